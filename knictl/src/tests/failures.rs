//! Tests error messages, exit codes, and the requests to the agent.

use std::{
    fs,
    future::pending,
    io::{self, ErrorKind, Write},
    os::unix::net::UnixListener,
};

use kni_proto::runtime::ListInterfacesRequest;
use tonic::Status;

use super::{Ran, answers, knictl, knictl_on};
use crate::{
    fake::{Agent, Answers},
    run,
    terminal::Terminal,
};

fn failed(err: &str) -> Ran {
    Ran {
        code: 1,
        out: String::new(),
        err: format!("knictl: {err}\n"),
    }
}

#[tokio::test]
async fn missing_or_deserted_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("kni.sock");
    let expected = failed(&format!(
        "no agent is serving on {}: is kni-agent running?",
        socket.display()
    ));
    assert_eq!(knictl_on(&socket, &["status"], pending()).await, expected);
    drop(UnixListener::bind(&socket).unwrap());
    assert_eq!(knictl_on(&socket, &["status"], pending()).await, expected);
    fs::remove_file(&socket).unwrap();
    fs::write(&socket, "no socket").unwrap();
    assert_eq!(knictl_on(&socket, &["status"], pending()).await, expected);
}

#[tokio::test]
async fn refusals_of_the_agent_are_told_without_its_controls() {
    let refusal = Status::permission_denied("not\nfor \u{1b}[31myou");
    let agent = Agent::serve(Answers {
        maps_refusal: Some(refusal),
        ..Answers::default()
    });
    let expected = failed("ListMaps failed: not\\nfor \\u{1b}[31myou (PermissionDenied)");
    assert_eq!(knictl(&agent, &["maps"]).await, expected);
}

#[tokio::test]
async fn older_agent_is_told() {
    let agent = Agent::serve(Answers {
        maps_refusal: Some(Status::unimplemented("")),
        ..Answers::default()
    });
    let expected = failed("the agent does not know ListMaps: is it of another version than knictl?");
    assert_eq!(knictl(&agent, &["maps"]).await, expected);
}

#[tokio::test]
async fn filters_reach_the_agent() {
    let agent = Agent::serve(answers::full());
    let filters = [
        "interfaces",
        "-n",
        "shop",
        "--pod",
        "web-0",
        "--network",
        "blue",
        "--sandbox",
        "5f2b",
    ];
    for args in [&filters[..], &["interfaces", "--namespace", "shop"], &["interfaces"]] {
        assert_eq!(knictl(&agent, args).await.code, 0);
    }
    let all = ListInterfacesRequest {
        pod_namespace: "shop".into(),
        pod_name: "web-0".into(),
        network: "blue".into(),
        sandbox_id: "5f2b".into(),
    };
    let namespace = ListInterfacesRequest {
        pod_namespace: "shop".into(),
        ..ListInterfacesRequest::default()
    };
    assert_eq!(
        agent.asked().interfaces,
        [all, namespace, ListInterfacesRequest::default()]
    );
}

/// The commands of knictl. `kubectl kni` has them, too.
const COMMANDS: [&str; 9] = [
    "status",
    "networks",
    "interfaces",
    "drops",
    "flows",
    "explain",
    "policy",
    "services",
    "maps",
];

#[tokio::test]
async fn mistyped_command_lines_are_told() {
    let agent = Agent::serve(Answers::default());
    for args in [
        &["frobnicate"][..],
        &["interfaces", "-o", "xml"],
        &["drops", "--json", "-o", "yaml"],
        &["flows", "--pod", "web-0"],
        &["explain", "shop/web-0", "10.0.0.1", "tcp/http"],
        &["explain", "shop/web-0", "10.0.0.1"],
        &["policy"],
    ] {
        let ran = knictl(&agent, args).await;
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args:?}");
        assert!(ran.err.starts_with("error: "), "{}", ran.err);
    }
    let ran = knictl(&agent, &["--help"]).await;
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    for word in COMMANDS.into_iter().chain(["KNI_SOCKET", "/run/kni/kni.sock"]) {
        assert!(ran.out.contains(word), "{word}");
    }
}

/// An output that always fails.
struct Failing(ErrorKind);

impl Write for Failing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

#[tokio::test]
async fn only_a_closed_pipe_is_no_failure() {
    let agent = Agent::serve(answers::full());
    let socket = agent.socket();
    for (kind, code, remark) in [
        (ErrorKind::BrokenPipe, 0, ""),
        (
            ErrorKind::StorageFull,
            1,
            "knictl: cannot write the output: no storage space\n",
        ),
    ] {
        for args in [&["maps"][..], &["drops", "--follow"], &["status", "-o", "yaml"]] {
            let mut err = Vec::new();
            let mut out = Failing(kind);
            let line = [&["knictl", "--socket", socket.to_str().unwrap()], args].concat();
            let ran = run::run(
                line.iter().map(Into::into),
                &mut Terminal::new(&mut out, &mut err),
                pending(),
            )
            .await;
            assert_eq!(
                (ran, String::from_utf8(err).unwrap().as_str()),
                (code, remark),
                "{args:?}"
            );
        }
    }
}

/// Runs `kubectl kni ARGS` without a cluster.
async fn kubectl_kni(args: &[&str]) -> Ran {
    let line = ["kubectl-kni", "--kubeconfig", "/nonexistent"];
    let line = line.iter().chain(args).map(Into::into);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = run::run(line, &mut Terminal::new(&mut out, &mut err), pending()).await;
    Ran {
        code,
        out: String::from_utf8(out).unwrap(),
        err: String::from_utf8(err).unwrap(),
    }
}

#[tokio::test]
async fn kubectl_kni_prints_help_in_lines_and_needs_no_cluster() {
    for command in COMMANDS.into_iter().chain(["doctor"]) {
        let ran = kubectl_kni(&[command, "--help"]).await;
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{command}");
        assert!(ran.out.contains("\n  -o, --output <FORM>"), "{command}: {}", ran.out);
        assert!(!ran.out.contains("\\n"), "{command}: {}", ran.out);
    }
}

#[tokio::test]
async fn an_option_behind_a_command_is_an_error_in_lines_that_names_its_place() {
    let ran = kubectl_kni(&["services", "--node", "n"]).await;
    assert_eq!((ran.code, ran.out.as_str()), (2, ""));
    assert!(
        ran.err.starts_with("error: unexpected argument '--node' found\n"),
        "{}",
        ran.err
    );
    assert!(ran.err.contains("--node goes before the command"), "{}", ran.err);
    assert!(!ran.err.contains("\\n"), "{}", ran.err);
}
