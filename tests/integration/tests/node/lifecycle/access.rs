use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::UnixStream,
    },
};

use anyhow::{Context as _, Result, anyhow};
use kni_integration::{
    Agent, AgentOptions, Node,
    agent::{KUBELET_SOCKET, SOCKET},
    patience, require,
};

use crate::watched::Watched;

/// The capabilities that the agent retains, with their numbers in Linux.
const KEPT: [(&str, u32); 6] = [
    ("CAP_NET_ADMIN", 12),
    ("CAP_NET_RAW", 13),
    ("CAP_SYS_PTRACE", 19),
    ("CAP_SYS_ADMIN", 21),
    ("CAP_PERFMON", 38),
    ("CAP_BPF", 39),
];
const UNPRIVILEGED: libc::c_long = 65_534;

fn field(status: &str, name: &str) -> Result<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = line.with_context(|| format!("no {name} in {status}"))?;
    Ok(u64::from_str_radix(value.trim(), 16)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_keeps_only_the_power_it_needs() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("power").await?;
    let own = fs::read_to_string("/proc/thread-self/status")?;
    let kept = KEPT.iter().fold(0, |mask, (_, number)| mask | 1_u64 << number) & field(&own, "CapPrm")?;
    assert_ne!(kept, 0, "this test has nothing to look at: {own}");
    let mut threads = 0;
    for thread in fs::read_dir(format!("/proc/{}/task", stage.agent.pid()))? {
        // A thread may have exited in the meantime.
        let Ok(status) = fs::read_to_string(thread?.path().join("status")) else {
            continue;
        };
        for (set, expected) in [
            ("CapEff", kept),
            ("CapPrm", kept),
            ("CapInh", 0),
            ("CapAmb", 0),
            ("NoNewPrivs", 1),
        ] {
            assert_eq!(field(&status, set)?, expected, "{set} of {status}");
        }
        // Dropping from the bounding set requires CAP_SETPCAP.
        if field(&own, "CapPrm")? & 1 << 8 != 0 {
            assert_eq!(field(&status, "CapBnd")?, kept & field(&own, "CapBnd")?, "{status}");
        }
        threads += 1;
    }
    assert!(threads > 1, "only one thread was seen");
    // The agent still works.
    let pod = stage.kubelet.run_pod("team", "web-0", &[]).await?;
    stage.kubelet.kill_pod(pod).await?;
    Ok(())
}

/// Connects as an unprivileged user and sends the HTTP/2 preface. Returns the number of bytes of the answer.
fn greet_unprivileged(socket: &str) -> std::io::Result<usize> {
    // SAFETY: the call changes the credentials of this thread only, which ends with the closure it runs.
    if unsafe { libc::syscall(libc::SYS_setresuid, UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(patience()))?;
    // The server may have closed the connection already; then the read fails.
    drop(stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"));
    match stream.read(&mut [0; 64]) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(0),
        other => other,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sockets_are_for_root_alone() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let stage = Watched::new("sockets").await?;
    for socket in [SOCKET, KUBELET_SOCKET] {
        let status = stage.node.enter(|| fs::symlink_metadata(socket))??;
        assert!(status.file_type().is_socket(), "{socket}");
        assert_eq!(status.permissions().mode() & 0o7777, 0o600, "{socket}");
        let refused = stage
            .node
            .enter(|| greet_unprivileged(socket))?
            .expect_err("nobody got in");
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::PermissionDenied,
            "{socket}: {refused}"
        );
    }
    // The peer's credentials are checked even if the file is accessible to all.
    stage
        .node
        .enter(|| fs::set_permissions(KUBELET_SOCKET, fs::Permissions::from_mode(0o666)))??;
    let answered = stage.node.enter(|| greet_unprivileged(KUBELET_SOCKET))??;
    assert_eq!(answered, 0, "nobody was answered");
    assert!(
        stage.agent.wait_for_log("connection refused", patience()),
        "{}",
        stage.agent.log()
    );
    assert!(stage.status().await?.ready, "root is served no longer");
    Ok(())
}

type Obstacle = (&'static str, fn() -> std::io::Result<()>, &'static str);

/// Kinds of files at the path of the socket, and their names in the agent's error.
const OBSTACLES: [Obstacle; 4] = [
    ("file", || fs::write(KUBELET_SOCKET, "precious"), "a file"),
    ("folder", || fs::create_dir(KUBELET_SOCKET), "a folder"),
    (
        "link",
        || {
            fs::write("/tmp/victim", "precious")
                .and_then(|()| std::os::unix::fs::symlink("/tmp/victim", KUBELET_SOCKET))
        },
        "a symbolic link",
    ),
    (
        "dangling",
        || std::os::unix::fs::symlink("/tmp/nowhere", KUBELET_SOCKET),
        "a symbolic link",
    ),
];

#[test]
fn what_lies_in_the_way_of_the_kubelets_socket_is_left_alone_and_stops_no_other_one() -> Result<()> {
    require!(root, netns, bpf, ip);
    for (name, make, called) in OBSTACLES {
        let node = Node::new(name)?;
        node.enter(make)??;
        let look = || -> Result<_> {
            node.enter(|| {
                let status = fs::symlink_metadata(KUBELET_SOCKET)?;
                let inode = std::os::unix::fs::MetadataExt::ino(&status);
                Ok((inode, status.file_type(), fs::read(KUBELET_SOCKET).unwrap_or_default()))
            })?
        };
        let before = look()?;
        let mut agent = Agent::start(&node, AgentOptions::default())?;
        let log = agent.log();
        assert!(log.contains(KUBELET_SOCKET) && log.contains(called), "{name}: {log}");
        assert_eq!(look()?, before, "{name}: it was touched");
        agent.terminate()?;
        assert_eq!(look()?, before, "{name}: it was touched at the end");
        let dangling = node.enter(|| fs::exists("/tmp/nowhere"))??;
        assert!(!dangling, "the link was followed");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_the_agent_cleanly_whoever_is_connected() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool);
    let mut stage = Watched::new("sigterm").await?;
    let pod = stage.kubelet.run_pod("team", "web-0", &[]).await?;
    let watching = kni_proto::runtime::WatchDropsRequest {};
    let mut drops = stage.kubelet.runtime().watch_drops(watching).await?.into_inner();
    let code = stage.agent.terminate()?.code();
    assert_eq!(code, Some(0), "{}", stage.agent.log());
    // The stream ends, with or without a message.
    tokio::time::timeout(patience(), async { while let Ok(Some(_)) = drops.message().await {} })
        .await
        .map_err(|_elapsed| anyhow!("the stream goes on without an agent"))?;
    for socket in [SOCKET, KUBELET_SOCKET] {
        assert!(!stage.node.enter(|| fs::exists(socket))??, "{socket} is still there");
    }
    assert!(pod.inside.run("ip", &["link", "show", "dev", "eth0"])?.contains("UP"));
    stage.restart().await?;
    assert_eq!(stage.kubelet.query(&pod.id).await?.ipconfigs, pod.interfaces);
    Ok(())
}
