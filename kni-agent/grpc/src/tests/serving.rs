//! Tests health, reflection, connection limits and the end of serving.

use std::{
    io::Read as _,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::Path,
};

use kni_proto::kni::{QueryNodeNetworksRequest, kni_client::KniClient};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_reflection::pb::{v1, v1alpha};

use super::{Served, fake::Mood, kni::attach, soon, until};

async fn health(client: &mut HealthClient<Channel>, service: &str) -> ServingStatus {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    client.check(request).await.unwrap().into_inner().status()
}

#[tokio::test]
async fn health_follows_readiness() {
    let mut served = Served::start().await;
    let mut client = HealthClient::new(served.connect("one").await);
    for (ready, expected) in [
        (None, ServingStatus::NotServing),
        (Some(true), ServingStatus::Serving),
        (Some(false), ServingStatus::NotServing),
    ] {
        if let Some(ready) = ready {
            served.health.set_ready(ready).await;
        }
        assert_eq!(health(&mut client, "").await, expected);
        assert_eq!(health(&mut client, "kni.KNI").await, expected);
        assert_eq!(
            health(&mut client, "kni.runtime.v1.Runtime").await,
            ServingStatus::Serving
        );
    }
    let unknown = HealthCheckRequest {
        service: "no.Such".to_owned(),
    };
    assert_eq!(client.check(unknown).await.unwrap_err().code(), Code::NotFound);
    let watch = HealthCheckRequest {
        service: "kni.runtime.v1.Runtime".to_owned(),
    };
    let mut watch = client.watch(watch).await.unwrap().into_inner();
    assert_eq!(
        soon(watch.message()).await.unwrap().unwrap().status(),
        ServingStatus::Serving
    );
    served.request_stop();
    assert_eq!(
        soon(watch.message()).await.unwrap().unwrap().status(),
        ServingStatus::NotServing
    );
    assert_eq!(soon(watch.message()).await.unwrap(), None);
    soon(&mut served.server).await.unwrap().unwrap();
}

const SERVICES: [&str; 3] = ["grpc.health.v1.Health", "kni.KNI", "kni.runtime.v1.Runtime"];

/// The services that one version of reflection lists.
macro_rules! reflected {
    ($version:ident, $channel:expr) => {{
        use $version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut client = ServerReflectionClient::new($channel);
        let sent = client.server_reflection_info(futures::stream::iter([request])).await;
        let answer = sent.unwrap().into_inner().message().await.unwrap().unwrap();
        let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
            panic!()
        };
        list.service.into_iter().map(|service| service.name).collect()
    }};
}

#[tokio::test]
async fn reflection_in_both_versions() {
    let served = Served::start().await;
    let v1: Vec<String> = reflected!(v1, served.connect("one").await);
    let v1alpha: Vec<String> = reflected!(v1alpha, served.connect("one").await);
    for names in [v1, v1alpha] {
        assert!(
            SERVICES.iter().all(|name| names.iter().any(|found| found == name)),
            "{names:?}"
        );
    }
    served.stop().await;
}

/// Connects as another user, on a separate thread, and returns how many bytes arrived before the end.
fn connect_as(uid: u32, path: &Path) -> std::io::Result<usize> {
    let path = path.to_owned();
    let thread = std::thread::spawn(move || {
        let unchanged = u32::MAX;
        // SAFETY: the call takes plain numbers. Made without libc's wrapper, it changes this thread alone, which ends
        // with this function.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, unchanged, uid, unchanged) };
        assert_eq!(result, 0);
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
        stream.read(&mut [0; 64])
    });
    thread.join().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn other_users_are_turned_away_even_where_the_mode_lets_them_connect() {
    let served = Served::start().await;
    let path = served.path("one");
    let denied = connect_as(12345, &path).unwrap_err();
    assert_eq!(
        denied.kind(),
        std::io::ErrorKind::PermissionDenied,
        "by the mode of the socket"
    );
    for (path, mode) in [(served.folder.path(), 0o755), (path.as_path(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    assert_eq!(connect_as(12345, &path).unwrap(), 0, "closed without a byte");
    assert!(connect_as(0, &path).unwrap() > 0, "the server's settings frame");
    served.stop().await;
}

#[tokio::test]
async fn connections_above_the_limit_are_closed_and_slots_come_back() {
    let served = Served::with_connections(2).await;
    let mut first = KniClient::new(served.connect("one").await);
    let second = UnixStream::connect(served.path("two")).unwrap();
    first.query_node_networks(QueryNodeNetworksRequest {}).await.unwrap();
    let path = served.path("one");
    let closed = tokio::task::spawn_blocking(move || {
        let mut third = UnixStream::connect(path).unwrap();
        third.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        third.read(&mut [0; 1]).unwrap()
    });
    assert_eq!(soon(closed).await.unwrap(), 0, "closed without an answer");
    first.query_node_networks(QueryNodeNetworksRequest {}).await.unwrap();
    drop(second);
    soon(async {
        loop {
            let mut next = KniClient::new(served.connect("two").await);
            if next.query_node_networks(QueryNodeNetworksRequest {}).await.is_ok() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    served.stop().await;
}

#[tokio::test]
async fn stopping_lets_running_calls_end_and_removes_the_sockets() {
    let mut served = Served::start().await;
    *served.backend.mood.lock().unwrap() = Mood::Gated;
    let mut client = KniClient::new(served.connect("one").await);
    let call = tokio::spawn(async move { client.attach_interface(attach("a1")).await });
    let mut asked = 0;
    until(|| {
        asked += served.backend.calls().len();
        asked == 1
    })
    .await;
    served.request_stop();
    let (one, two) = (served.path("one"), served.path("two"));
    until(|| !one.exists() && !two.exists()).await;
    UnixStream::connect(&one).unwrap_err();
    assert!(!served.server.is_finished(), "it waits for the call");
    served.backend.gate.add_permits(1);
    soon(call).await.unwrap().unwrap();
    soon(&mut served.server).await.unwrap().unwrap();
}
