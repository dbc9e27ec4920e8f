//! Checks the details of addresses in the answer to an attach.

use std::net::IpAddr;

use serde::Deserialize;
use serde_json::Value;

use crate::{
    error::{Failure, Result, require},
    sandbox::PRIMARY,
    session::Session,
};

const KEY: &str = "addresses";

/// An entry of the list.
#[derive(Debug, Deserialize)]
struct Details {
    ip: IpAddr,
    family: Value,
    prefix: u8,
    #[serde(default)]
    gateway: Option<IpAddr>,
}

pub(super) async fn addresses(session: &Session) -> Result<()> {
    let pod = session.pod("details").await?;
    let config = pod.interfaces.get(PRIMARY);
    let Some(text) = config.and_then(|config| config.extradata.get(KEY)) else {
        return Err(Failure::NotOffered(format!("the answer has no extradata[{KEY:?}]")));
    };
    let details: Vec<Details> = serde_json::from_str(text).map_err(|error| {
        Failure::Wrong(format!(
            "extradata[{KEY:?}] is {text}, which is no list of addresses: {error}"
        ))
    })?;
    let ips: Vec<IpAddr> = details.iter().map(|entry| entry.ip).collect();
    require!(
        ips == pod.addresses,
        "extradata[{KEY:?}] lists {ips:?}, the answer {:?}",
        pod.addresses
    );
    for entry in details {
        let (number, most) = if entry.ip.is_ipv4() { ('4', 32) } else { ('6', 128) };
        // "IPv4", "ipv4" and 4 are the same.
        let family = entry.family.to_string();
        let digits: String = family.chars().filter(char::is_ascii_digit).collect();
        require!(digits == number.to_string(), "{} has the family {family}", entry.ip);
        require!(entry.prefix <= most, "{} has the prefix {}", entry.ip, entry.prefix);
        require!(
            entry
                .gateway
                .is_none_or(|gateway| gateway.is_ipv4() == entry.ip.is_ipv4()),
            "{} has the gateway {:?}",
            entry.ip,
            entry.gateway
        );
    }
    Ok(())
}
