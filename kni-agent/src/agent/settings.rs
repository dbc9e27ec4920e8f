//! Converts the command line to settings of the dataplane and the services.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kni_controllers::Tunnel;
use kni_dataplane::{DataplaneOptions, FlowLifetimes, NodeConfig, XdpChoice};
use kni_enforcement::{Quota, ServiceQuota};
use kni_model::service::NodePlace;
use kni_plugins::{PluginOptions, Plugins};
use kni_reflectors::RequestLimits;
use kni_uplink::UplinkOptions;
use nix::sys::utsname::uname;

use crate::cli::{FamilyArg, PluginArgs, ServeArgs, UplinkArgs};

pub(super) fn dataplane_options(args: &ServeArgs) -> Result<DataplaneOptions> {
    let object = match &args.ebpf_object {
        Some(path) => std::fs::read(path).with_context(|| format!("reading {}", path.display()))?,
        None => kni_object::embedded().context("the eBPF object")?,
    };
    Ok(DataplaneOptions {
        object,
        root: args.paths.bpf_root.clone(),
        max_endpoints: args.max_endpoints,
        max_flows: args.flows.max_flows,
        max_policy_rows: args.max_policy_rows,
        max_services: args.max_services,
        hook: args.hook.into(),
    })
}

/// The rows of the policy tables, those of one namespace, and the rows of the service tables.
pub(super) fn quotas(args: &ServeArgs) -> (Quota, ServiceQuota) {
    let rows = |rows: u32| usize::try_from(rows).unwrap_or(usize::MAX);
    let policies = Quota {
        capacity: rows(args.max_policy_rows),
        share: rows(args.max_policy_rows_per_namespace.unwrap_or(args.max_policy_rows / 8)),
    };
    let services = ServiceQuota {
        services: rows(args.max_services),
        backends: rows(args.max_services.saturating_mul(4)),
    };
    (policies, services)
}

pub(super) fn node_config(args: &ServeArgs) -> NodeConfig {
    NodeConfig {
        flow_events_per_second: args.flows.flow_events_per_second,
        flows_per_endpoint: args.flows.max_flows_per_endpoint.unwrap_or(args.flows.max_flows / 8),
        lifetimes: FlowLifetimes {
            tcp_established: args.flows.tcp_timeout.0,
            udp_established: args.flows.udp_timeout.0,
            ..FlowLifetimes::default()
        },
    }
}

pub(super) fn request_limits(args: &ServeArgs) -> RequestLimits {
    let limits = RequestLimits::default();
    match args.test.api_limit {
        Some(seconds) => RequestLimits {
            call: Duration::from_secs(seconds),
            list: Duration::from_secs(seconds),
            watch_idle: Duration::from_secs(seconds * 20),
            pause: Duration::from_secs(seconds),
        },
        None => limits,
    }
}

/// XDP runs where a feature needs it, unless the operator sets the mode.
pub(super) fn uplink(args: &ServeArgs) -> Result<UplinkOptions> {
    let UplinkArgs {
        uplink,
        masquerade_ports,
        deny_source,
        drop_bogons,
        uplink_xdp,
    } = &args.uplink;
    let has_sources = !deny_source.is_empty() || *drop_bogons;
    let xdp = uplink_xdp.map_or(if has_sources { XdpChoice::Auto } else { XdpChoice::Off }, Into::into);
    if has_sources && xdp == XdpChoice::Off {
        bail!("--deny-source and --drop-bogons are what the XDP program does: not with --uplink-xdp off");
    }
    Ok(UplinkOptions {
        interface: uplink.clone(),
        ports: masquerade_ports.clone(),
        deny: deny_source.clone(),
        drop_bogons: *drop_bogons,
        xdp,
    })
}

/// How other nodes shall reach this one.
pub(super) fn tunnel(args: &ServeArgs) -> Tunnel {
    Tunnel {
        port: args.fabric.overlay_port,
        prefers_ipv4: args.fabric.underlay_family != Some(FamilyArg::Ipv6),
    }
}

/// CNI plugins, where the options enable them.
pub(super) fn plugins(args: &ServeArgs) -> Option<Plugins> {
    let PluginArgs {
        cni_backend,
        cni_bin_dirs,
        cni_conf_dir,
        cni_cache_dir,
    } = args.plugins.clone();
    cni_backend.then(|| {
        Plugins::new(PluginOptions {
            bin_dirs: cni_bin_dirs,
            conf_dir: cni_conf_dir,
            cache_dir: cni_cache_dir,
        })
    })
}

/// The node's name as the kubelet writes it: in lowercase.
pub(super) fn place(args: &ServeArgs) -> NodePlace {
    let hostname = || match uname() {
        Ok(names) => names.nodename().to_string_lossy().to_lowercase(),
        Err(error) => {
            tracing::warn!(%error, "the node has no name; no endpoint of a service counts as local");
            String::new()
        }
    };
    NodePlace {
        name: args.node_name.clone().unwrap_or_else(hostname),
        zone: args.zone.clone(),
    }
}
