//! Parses the values of options.

use std::{net::SocketAddr, ops::RangeInclusive, str::FromStr, time::Duration};

use clap::ValueEnum;
use kni_dataplane::{HookChoice, XdpChoice};

/// A family of addresses on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FamilyArg {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// [`XdpChoice`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum XdpArg {
    /// Native if the driver supports it, else generic.
    Auto,
    /// Native, or an error.
    Native,
    /// Generic: in front of the network stack.
    Generic,
    /// No XDP program.
    Off,
}

impl From<XdpArg> for XdpChoice {
    fn from(arg: XdpArg) -> Self {
        match arg {
            XdpArg::Auto => Self::Auto,
            XdpArg::Native => Self::Native,
            XdpArg::Generic => Self::Generic,
            XdpArg::Off => Self::Off,
        }
    }
}

/// A duration between one second and thirty days.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds: u64 = text.parse().map_err(|_not_one| "not a number of seconds".to_owned())?;
        if (1..=30 * 24 * 3600).contains(&seconds) {
            Ok(Self(Duration::from_secs(seconds)))
        } else {
            Err("not between 1 and 2592000".to_owned())
        }
    }
}

/// Address of the metrics page; `None`: the page is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricsAddress(pub Option<SocketAddr>);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let address = text
            .parse()
            .map_err(|_not_one| "neither ADDRESS:PORT nor \"none\"".to_owned())?;
        Ok(Self(Some(address)))
    }
}

/// A file name without a directory, with the extension of a list of plugins.
pub(super) fn file_name(text: &str) -> Result<String, String> {
    if text.contains('/') || text.starts_with('.') || !text.ends_with(".conflist") {
        return Err("not the name of a .conflist file".to_owned());
    }
    Ok(text.to_owned())
}

pub(super) fn port_range(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.split_once('-').ok_or("not FIRST-LAST")?;
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0);
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err("not two ports, the smaller one first".to_owned()),
    }
}

/// [`HookChoice`] on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum HookArg {
    /// TCX since Linux 6.6, clsact before.
    Auto,
    /// TCX, or an error.
    Tcx,
    /// clsact.
    Clsact,
}

impl From<HookArg> for HookChoice {
    fn from(arg: HookArg) -> Self {
        match arg {
            HookArg::Auto => Self::Auto,
            HookArg::Tcx => Self::Tcx,
            HookArg::Clsact => Self::Clsact,
        }
    }
}
