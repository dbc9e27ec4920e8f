use super::*;

fn parse(text: &str) -> Result<Config, CniError> {
    Config::parse(text.as_bytes())
}

fn with(more: &str) -> Config {
    parse(&format!(
        r#"{{"cniVersion":"1.1.0","name":"kni","type":"kni-cni"{more}}}"#
    ))
    .unwrap()
}

#[test]
fn a_short_configuration_has_defaults() {
    let config = with("");
    assert_eq!(config.socket, PathBuf::from("/run/kni/kni.sock"));
    assert_eq!(config.state_dir, PathBuf::from("/var/lib/kni"));
    assert_eq!((config.network, config.default_route), (None, None));
    assert!(config.timeouts.status() < Duration::from_secs(1));
    assert!(config.timeouts.del_connect() <= Duration::from_secs(2));
    assert!(config.prev_result.is_none() && config.runtime.annotations.is_empty());
}

#[test]
fn what_others_put_there_passes() {
    let config = with(
        r#","capabilities":{"x":true},"ipam":{"type":"y"},"runtimeConfig":{"aliases":["z"],"podAnnotations":1},"timeouts":{"addMs":7,"later":1}"#,
    );
    assert_eq!(config.timeouts.add(), Duration::from_millis(7));
}

#[test]
fn all_that_a_runtime_says() {
    let config = with(
        r#","socket":"/s","network":"blue","stateDir":"/d","defaultRoute":false,"dns":{"nameservers":["10.0.0.53"],"search":["a"]},
        "runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"192.0.2.1"}],
        "bandwidth":{"ingressRate":1},"dns":{"servers":["10.96.0.10"],"searches":["svc"],"options":["ndots:5"]},
        "ips":["10.1.0.5/24"],"mac":"02:00:00:00:00:01","cgroupPath":"/kubepods",
        "io.kubernetes.cri.pod-annotations":{"a":"b"}}"#,
    );
    let runtime = config.runtime;
    assert_eq!(
        runtime.port_mappings,
        [PortMapping {
            host_port: 8080,
            container_port: 80,
            protocol: "tcp".into(),
            host_ip: "192.0.2.1".into()
        }]
    );
    assert_eq!(
        (runtime.dns.servers, runtime.dns.options),
        (vec!["10.96.0.10".into()], vec!["ndots:5".into()])
    );
    assert_eq!(
        (runtime.ips, runtime.mac.as_str()),
        (vec!["10.1.0.5/24".into()], "02:00:00:00:00:01")
    );
    assert_eq!(
        (runtime.cgroup_path.as_str(), runtime.annotations["a"].as_str()),
        ("/kubepods", "b")
    );
    assert_eq!(
        (config.dns.servers, config.dns.searches),
        (vec!["10.0.0.53".into()], vec!["a".into()])
    );
    assert_eq!(
        (config.network.as_deref(), config.default_route),
        (Some("blue"), Some(false))
    );
}

#[test]
fn what_go_leaves_empty_is_null() {
    let config = with(
        r#","runtimeConfig":{"portMappings":null,"bandwidth":null,"dns":null,"ips":null,"mac":null,"io.kubernetes.cri.pod-annotations":null},"prevResult":null"#,
    );
    assert!(config.runtime.port_mappings.is_empty() && config.prev_result.is_none());
}

#[test]
fn what_is_wrong_is_named_with_its_code() {
    for (text, code, part) in [
        ("", ErrorCode::Decode, "EOF"),
        ("7", ErrorCode::Decode, "network configuration"),
        (r#"{"cniVersion":"1.1.0","name":7}"#, ErrorCode::Decode, "name"),
        (r#"{"name":"kni"}"#, ErrorCode::IncompatibleVersion, "cniVersion"),
        (
            r#"{"cniVersion":"0.2.0","name":"kni"}"#,
            ErrorCode::IncompatibleVersion,
            "0.2.0",
        ),
        (r#"{"cniVersion":"1.1.0"}"#, ErrorCode::InvalidConfig, "name"),
        (
            r#"{"cniVersion":"1.1.0","name":"-a"}"#,
            ErrorCode::InvalidConfig,
            "name",
        ),
        (
            r#"{"cniVersion":"1.1.0","name":"a","socket":"run"}"#,
            ErrorCode::InvalidConfig,
            "socket",
        ),
        (
            r#"{"cniVersion":"1.1.0","name":"a","stateDir":""}"#,
            ErrorCode::InvalidConfig,
            "stateDir",
        ),
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!(error.code, code, "{text}");
        assert!(error.msg.contains(part), "{text}: {}", error.msg);
    }
}

#[test]
fn a_missing_list_is_not_an_empty_one() {
    let valid = |container: &str, ifname: &str| Valid {
        container: container.into(),
        ifname: ifname.into(),
    };
    assert_eq!(with("").valid_attachments(), None);
    for empty in ["[]", "null"] {
        let found = with(&format!(r#","cni.dev/valid-attachments":{empty}"#)).valid_attachments();
        assert_eq!(found, Some(Vec::new()));
    }
    for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
        let found = with(&format!(r#","{key}":[{{"containerID":"a","ifname":"eth0"}}]"#)).valid_attachments();
        assert_eq!(found, Some(vec![valid("a", "eth0")]));
    }
    let both = r#","cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}],"cni.dev/attachments":[{"containerID":"b","ifname":"net1"},{"containerID":"a","ifname":"eth0"}]"#;
    let found = with(both).valid_attachments();
    assert_eq!(found, Some(vec![valid("a", "eth0"), valid("b", "net1")]));
}

#[test]
fn containerd_writes_keys_with_capital_letters() {
    let config = Config::parse(
        br#"{"cniVersion":"1.1.0","name":"kni","type":"kni-cni","runtimeConfig":{
        "portMappings":[{"HostPort":8080,"ContainerPort":80,"Protocol":"tcp","HostIP":"192.0.2.1"}],
        "dns":{"Servers":["10.96.0.10"],"Searches":["svc"],"Options":["ndots:5"]}}}"#,
    )
    .unwrap();
    let port = &config.runtime.port_mappings[0];
    assert_eq!((port.host_port, port.container_port), (8080, 80));
    assert_eq!((port.protocol.as_str(), port.host_ip.as_str()), ("tcp", "192.0.2.1"));
    assert_eq!(config.runtime.dns.servers, ["10.96.0.10"]);
    assert_eq!(
        (config.runtime.dns.searches.len(), config.runtime.dns.options.len()),
        (1, 1)
    );
}
