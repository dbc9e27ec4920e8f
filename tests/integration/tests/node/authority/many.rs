//! Thousands of requests on one connection: the header tables of both sides stay in step.

use anyhow::{Context as _, Result};
use kni_integration::{Manifest, Stage, agent::KUBELET_SOCKET, h2raw::Call, require};
use kni_proto::kni::{QueryPodNetworkRequest, QueryPodNetworkResponse};
use prost::Message as _;

use super::{ATTACH, QUERY, attach, authorities, open, sandbox, served};

const REQUESTS: usize = 3000;

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_requests_on_one_connection_are_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("thousands", Manifest::overlapping()).await?;
    let sandbox = sandbox(&stage, "thousands").await?;
    let message = attach(&sandbox);
    let mut query = QueryPodNetworkRequest::default();
    query.id.clone_from(&sandbox.id);
    let query = query.encode_to_vec();
    let authorities = authorities(KUBELET_SOCKET);
    let addresses = served(&open(&stage, KUBELET_SOCKET)?.call(&Call::new(ATTACH, &authorities[0], &message))?)?;

    let mut connection = open(&stage, KUBELET_SOCKET)?;
    for number in 0..REQUESTS {
        // Long runs of one authority, so that it is sent as an index, and changes between them. The trace is now old,
        // now new, and together they do not fit the table: entries are evicted and come again.
        let authority = &authorities[number / 7 % authorities.len()];
        let trace = format!("{:>0width$}", number % 97, width = 40 + number % 50);
        let metadata = [("x-trace", trace.as_str())];
        let attaching = number % 10 == 0;
        let call = Call {
            metadata: if number % 3 == 0 { &[] } else { &metadata },
            ..Call::new(
                if attaching { ATTACH } else { QUERY },
                authority,
                if attaching { &message } else { &query },
            )
        };
        let what = || format!("request {number} to {authority}");
        let reply = connection.call(&call).with_context(what)?;
        let got = if attaching {
            served(&reply).with_context(what)?
        } else {
            assert_eq!(reply.grpc_status, Some(0), "{}: {}", what(), reply.grpc_message);
            QueryPodNetworkResponse::decode(&*reply.message)?.ipconfigs["eth0"]
                .ip
                .clone()
        };
        assert_eq!(got, addresses, "{}", what());
    }
    Ok(())
}
