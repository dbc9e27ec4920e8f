//! ADD: calls `AttachInterface` and converts its result for the runtime.

use std::collections::BTreeMap;

use kni_proto::{
    cni,
    kni::{AttachInterfaceRequest, DnsConfig, Isolation, PortMapping, Protocol, kni_client::KniClient},
};

use super::del;
use crate::{
    client::{Client, Failure, Patience},
    config::{self, Config},
    environment::Environment,
    error::{CniError, ErrorCode},
    result::{CniResult, has_no_primary_interface},
};

/// Attaches and returns the result as text. The call is retried when the agent was away, always with the same
/// invocation id, so that it takes effect once; if the outcome stays unknown, it is undone.
pub(super) async fn run(client: Client<'_>, environment: &Environment, config: &Config) -> Result<String, CniError> {
    if config.prev_result.is_some() {
        let msg = "kni-cni makes interfaces and must be the first plugin of its list (prevResult is given)";
        return Err(CniError::new(ErrorCode::InvalidConfig, msg));
    }
    if !std::path::Path::new(&environment.netns).exists() {
        let msg = format!("network namespace {} (CNI_NETNS) does not exist", environment.netns);
        return Err(CniError::new(ErrorCode::InvalidNetns, msg));
    }
    let invocation = random_text()?;
    let wanted = request(environment, config, &invocation)?;
    let patience = Patience {
        connect: config.timeouts.connect(),
        total: config.timeouts.add(),
    };
    let attach = |channel| {
        let request = client.request(wanted.clone());
        async move { KniClient::new(channel).attach_interface(request).await }
    };
    let answer = match client.call(patience, attach).await {
        Ok(answer) => answer,
        Err(Failure::Refused(status)) => return Err(CniError::refused("AttachInterface", &status)),
        Err(Failure::Absent(reason)) => return Err(CniError::new(ErrorCode::TryAgainLater, reason)),
        Err(Failure::Unanswered(reason)) => {
            let error = CniError::new(ErrorCode::TryAgainLater, reason);
            // The runtime receives the first error; this one it will receive when it deletes.
            del::undo(client, environment, config, &invocation).await.ok();
            return Err(error);
        }
    };
    let is_none = has_no_primary_interface(&answer.extradata);
    if !is_none && !answer.ipconfigs.contains_key(&environment.ifname) {
        let msg = format!("kni-agent has attached no interface {}", environment.ifname);
        return Err(CniError::new(ErrorCode::Failed, msg));
    }
    let mut result = CniResult::of_answer(&answer.ipconfigs, &environment.ifname, &environment.netns, &config.dns);
    if is_none {
        result.add_dummy_address();
    }
    Ok(result.to_json(config.version()?))
}

fn request(environment: &Environment, config: &Config, invocation: &str) -> Result<AttachInterfaceRequest, CniError> {
    let args = &environment.args;
    let runtime = &config.runtime;
    let label = |key: &str, value: &str| (format!("io.kubernetes.pod.{key}"), value.to_owned());
    let dns = &runtime.dns;
    Ok(AttachInterfaceRequest {
        name: args.name.clone(),
        id: cni::sandbox_id(&environment.container, &environment.ifname),
        namespace: args.namespace.clone(),
        isolation: Some(Isolation {
            path: environment.netns.clone(),
            r#type: "namespace".to_owned(),
            ..Isolation::default()
        }),
        dns_config: (*dns != config::Dns::default()).then(|| DnsConfig {
            servers: dns.servers.clone(),
            searches: dns.searches.clone(),
            options: dns.options.clone(),
        }),
        port_mappings: runtime.port_mappings.iter().map(mapping).collect::<Result<_, _>>()?,
        labels: [
            label("name", &args.name),
            label("namespace", &args.namespace),
            label("uid", &args.uid),
        ]
        .into(),
        annotations: runtime.annotations.clone(),
        extradata: extradata(environment, config, invocation),
    })
}

/// Empty values are omitted: they request nothing.
fn extradata(environment: &Environment, config: &Config, invocation: &str) -> BTreeMap<String, String> {
    let runtime = &config.runtime;
    let bare = |ip: &String| ip.split_once('/').map_or(ip.clone(), |(ip, _prefix)| ip.to_owned());
    let ips: Vec<String> = if runtime.ips.is_empty() {
        vec![bare(&environment.args.ip)]
    } else {
        runtime.ips.iter().map(bare).collect()
    };
    let mac = if runtime.mac.is_empty() {
        &environment.args.mac
    } else {
        &runtime.mac
    };
    let bandwidth = runtime.bandwidth.as_ref().map(ToString::to_string);
    let default_route = config.default_route.map(|wanted| wanted.to_string());
    let entries = [
        ("netns", environment.netns.clone()),
        (cni::IFNAME, environment.ifname.clone()),
        (cni::NETWORK, config.name.clone()),
        (cni::CONTAINER, environment.container.clone()),
        (cni::INVOCATION, invocation.to_owned()),
        (cni::POD_NETWORK, config.network.clone().unwrap_or_default()),
        (cni::DEFAULT_ROUTE, default_route.unwrap_or_default()),
        (cni::IPS, ips.join(",")),
        (cni::MAC, mac.clone()),
        (cni::BANDWIDTH, bandwidth.unwrap_or_default()),
        (cni::CGROUP_PATH, runtime.cgroup_path.clone()),
    ];
    let said = entries.into_iter().filter(|(_, value)| !value.is_empty());
    said.map(|(key, value)| (key.to_owned(), value)).collect()
}

fn mapping(mapping: &config::PortMapping) -> Result<PortMapping, CniError> {
    let protocol = match mapping.protocol.to_ascii_lowercase().as_str() {
        "" | "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        other => {
            let msg = format!("runtimeConfig.portMappings: protocol {other:?} is none of tcp, udp and sctp");
            return Err(CniError::new(ErrorCode::InvalidConfig, msg));
        }
    };
    Ok(PortMapping {
        protocol: protocol.into(),
        container_port: mapping.container_port,
        host_port: mapping.host_port,
        host_ip: mapping.host_ip.clone(),
    })
}

/// 128 random bits, unique to the call.
fn random_text() -> Result<String, CniError> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)
        .map_err(|error| CniError::new(ErrorCode::Io, format!("no random number for the call: {error}")))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(args: &str, ifname: &str) -> Environment {
        Environment::read(|name| {
            let value = match name {
                "CNI_CONTAINERID" => "abc",
                "CNI_NETNS" => "/run/netns/x",
                "CNI_IFNAME" => ifname,
                "CNI_ARGS" => args,
                _ => return None,
            };
            Some(value.to_owned())
        })
    }

    fn made(environment: &Environment, more: &str) -> AttachInterfaceRequest {
        let config = Config::parse(format!(r#"{{"cniVersion":"1.1.0","name":"kni"{more}}}"#).as_bytes()).unwrap();
        request(environment, &config, "once").unwrap()
    }

    const ARGS: &str = "K8S_POD_UID=u;K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop";

    #[test]
    fn the_pod_is_named_in_every_way_that_the_agent_knows() {
        let request = made(&environment(ARGS, "eth0"), "");
        assert_eq!(
            (request.id.as_str(), request.name.as_str(), request.namespace.as_str()),
            ("abc", "web-0", "shop")
        );
        assert_eq!(request.labels["io.kubernetes.pod.uid"], "u");
        assert_eq!(request.isolation.unwrap().path, "/run/netns/x");
        let extradata: Vec<(&str, &str)> = request
            .extradata
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        let expected = [
            ("cni.container", "abc"),
            ("cni.ifname", "eth0"),
            ("cni.invocation", "once"),
            ("cni.network", "kni"),
            ("netns", "/run/netns/x"),
        ];
        assert_eq!(extradata, expected);
        assert!(request.dns_config.is_none() && request.annotations.is_empty());
    }

    #[test]
    fn a_further_interface_is_a_sandbox_of_its_own() {
        let request = made(&environment(ARGS, "net1"), r#","network":"blue","defaultRoute":true"#);
        assert_eq!(request.id, "abc:net1");
        assert_eq!(request.extradata["cni.pod_network"], "blue");
        assert_eq!(request.extradata["cni.default_route"], "true");
    }

    #[test]
    fn wishes_of_the_runtime() {
        let wishes = r#","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"UDP","hostIP":"::1"},
            {"hostPort":0,"containerPort":81}],"ips":["10.1.0.5/24","fd00::5"],"mac":"02:00:00:00:00:01","cgroupPath":"/c",
            "bandwidth":{"ingressRate":8},"dns":{"servers":["10.96.0.10"]},"io.kubernetes.cri.pod-annotations":{"a":"b"}}"#;
        let request = made(&environment(&format!("{ARGS};IP=10.0.0.1;MAC=x"), "eth0"), wishes);
        let first = &request.port_mappings[0];
        assert_eq!((first.protocol, first.container_port, first.host_port), (1, 80, 8080));
        assert_eq!((first.host_ip.as_str(), request.port_mappings[1].protocol), ("::1", 0));
        for (key, value) in [
            ("cni.ips", "10.1.0.5,fd00::5"),
            ("cni.mac", "02:00:00:00:00:01"),
            ("cni.bandwidth", r#"{"ingressRate":8}"#),
            ("cgroupPath", "/c"),
        ] {
            assert_eq!(request.extradata[key], value);
        }
        assert_eq!(request.dns_config.unwrap().servers, ["10.96.0.10"]);
        assert_eq!(request.annotations["a"], "b");
        // Only CNI_ARGS requests addresses.
        let request = made(&environment(&format!("MAC=m;{ARGS};IP=10.0.0.1/24"), "eth0"), "");
        assert_eq!(
            (
                request.extradata["cni.ips"].as_str(),
                request.extradata["cni.mac"].as_str()
            ),
            ("10.0.0.1", "m")
        );
    }

    #[test]
    fn each_call_is_another_one() {
        let [one, other] = [random_text().unwrap(), random_text().unwrap()];
        assert_eq!(one.len(), 32);
        assert_ne!(one, other);
    }
}
