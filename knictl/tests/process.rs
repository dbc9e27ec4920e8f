//! The installed program as a process: environment, exit codes, signals, closed pipes.

#[cfg(test)]
#[expect(dead_code, reason = "the in-process tests use the rest of it")]
#[path = "../src/fake.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _},
        process::{Child, Command, ExitStatus, Stdio},
        thread,
        time::{Duration, Instant},
    };

    use kni_proto::runtime::{DropEvent, GetStatusResponse};
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    use tokio::runtime::{Builder, Runtime};

    use crate::fake::{After, Agent, Answers};

    /// A fake agent whose runtime runs on threads of its own.
    struct Node {
        agent: Agent,
        _runtime: Runtime,
    }

    impl Node {
        fn serve(answers: Answers) -> Self {
            let runtime = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let agent = runtime.block_on(async { Agent::serve(answers) });
            Self {
                agent,
                _runtime: runtime,
            }
        }

        /// `knictl ARGS`, with the agent's socket in the environment.
        fn knictl(&self, args: &[&str]) -> Command {
            let mut command = Command::new(env!("CARGO_BIN_EXE_knictl"));
            command
                .args(args)
                .env("KNI_SOCKET", self.agent.socket())
                .stdin(Stdio::null())
                .stdout(Stdio::piped());
            command
        }
    }

    /// A child that does not outlive its test.
    struct Follower(Child);

    impl Follower {
        /// `knictl drops --follow` after it printed an event, and its output.
        fn start(node: &Node) -> (Self, BufReader<std::process::ChildStdout>) {
            let mut child = node
                .knictl(&["drops", "--follow"])
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut out = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            assert!(line.contains(" source_mac "), "{line:?}");
            (Self(child), out)
        }

        /// Its exit status and its output; fails if it runs for more than ten seconds.
        fn end(&mut self) -> (ExitStatus, String) {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(10) {
                if let Some(status) = self.0.try_wait().unwrap() {
                    let mut remarks = String::new();
                    self.0.stderr.take().unwrap().read_to_string(&mut remarks).unwrap();
                    return (status, remarks);
                }
                thread::sleep(Duration::from_millis(10));
            }
            panic!("knictl drops --follow goes on");
        }
    }

    impl Drop for Follower {
        fn drop(&mut self) {
            // It has ended already, except when the test failed.
            self.0.kill().unwrap_or_default();
            self.0.wait().map(drop).unwrap_or_default();
        }
    }

    fn dropping() -> Node {
        let event = DropEvent {
            reason: "source_mac".to_owned(),
            ..DropEvent::default()
        };
        Node::serve(Answers {
            events: vec![event],
            after: After::Stays,
            ..Answers::default()
        })
    }

    #[test]
    fn exit_code_tells_readiness() {
        for ready in [true, false] {
            let node = Node::serve(Answers {
                status: GetStatusResponse {
                    ready,
                    ..Default::default()
                },
                ..Default::default()
            });
            let output = node.knictl(&["status"]).output().unwrap();
            assert_eq!(output.status.code(), Some(i32::from(!ready)));
            assert!(
                String::from_utf8(output.stdout)
                    .unwrap()
                    .contains(&format!("Ready:               {ready}\n"))
            );
        }
    }

    #[test]
    fn option_outranks_environment() {
        let node = Node::serve(Answers::default());
        let output = node
            .knictl(&["status", "--socket", "/nonexistent/kni.sock"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
    }

    #[test]
    fn signals_end_following_cleanly() {
        for signal in [Signal::SIGINT, Signal::SIGTERM] {
            let node = dropping();
            let (mut follower, _out) = Follower::start(&node);
            kill(Pid::from_raw(follower.0.id().cast_signed()), signal).unwrap();
            let (status, remarks) = follower.end();
            assert_eq!((status.code(), remarks.as_str()), (Some(0), ""), "{signal}");
        }
    }

    #[test]
    fn closed_pipe_ends_following_without_another_event() {
        let node = dropping();
        let (mut follower, out) = Follower::start(&node);
        drop(out);
        let (status, remarks) = follower.end();
        assert_eq!((status.code(), remarks.as_str()), (Some(0), ""));
    }

    #[test]
    fn closed_pipe_is_no_failure_of_a_list() {
        let node = dropping();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = node
            .knictl(&["maps", "-o", "json"])
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
    }
}
