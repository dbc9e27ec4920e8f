//! Lists the rows of the table.

use super::{
    measured::Class,
    operations::Operation,
    row::{Change, Loss, Row},
};

/// Without an operation.
pub(super) const CONTROL: Row = Row::whole("nothing", Operation::Nothing);

/// Controls: faults that the measurement must find.
pub(super) const FAULTS: [Row; 2] = [
    Row {
        losses: &[(Class::Third, Loss::Must)],
        ..Row::whole(
            "control: the tunnel device of node3 is taken down",
            Operation::TunnelDown,
        )
    },
    Row {
        changes: &[Change::must("PodNetwork", "metadata.labels.test/changed")],
        ..Row::whole("control: the network has another label", Operation::ObjectChanged)
    },
];

/// The rows that come first: a fault of the table shows early.
pub(super) const FIRST: [Row; 3] = [POLICY, LEASE, REBOOT];

const POLICY: Row = Row::whole("policy mistyped, and corrected", Operation::PolicyMistyped);

const LEASE: Row = Row::whole("Lease of kni-controller deleted", Operation::LeaseDeleted);

const LABEL: Row = Row {
    losses: &[
        (Class::Beside, Loss::Must),
        (Class::Across, Loss::Must),
        (Class::Service, Loss::Must),
        (Class::Third, Loss::Must),
        (Class::Opened, Loss::May),
    ],
    reasons: &["endpoint_not_ready"],
    ..Row::whole(
        "namespace without its label for a while, in a network that revokes",
        Operation::LabelRemoved,
    )
};

const REBOOT: Row = Row {
    losses: &[(Class::Third, Loss::Must)],
    changes: &[
        Change::must("PodInterface", "spec.sandboxId"),
        // The report of before the reboot is withdrawn, so that its addresses rest.
        Change::must("NetworkMembers", "metadata.uid"),
        // The MAC address.
        Change::must("Pod", "network-status"),
        Change::may("PodInterface", "metadata.uid"),
        Change::may("PodInterface", "status."),
    ],
    ..Row::whole("reboot of node3", Operation::Rebooted)
};

/// Reports that are made anew for a node with another UID.
const REGISTERED: &[Change] = &[
    Change::must("Node", "metadata.uid"),
    Change::must("AddressBlock", "spec.nodeUID"),
    Change::must("NetworkMembers", "spec.nodeUID"),
    Change::must("NodeEndpoint", "spec.nodeUID"),
    Change::may("NetworkMembers", "metadata."),
    Change::may("NodeEndpoint", "metadata."),
    Change::may("NodeEndpoint", "spec.epoch"),
    Change::may("NodeNetwork", "metadata."),
    // Of the agent that starts.
    Change::may("PodInterface", "programId"),
];

const fn registered(name: &'static str, operation: Operation) -> Row {
    Row {
        // Its pods are not reached from other nodes as soon as these know that it is gone.
        losses: &[(Class::Third, Loss::May)],
        changes: REGISTERED,
        ..Row::whole(name, operation)
    }
}

/// The number of a network that is gone rests for an hour.
const NUMBERS: &[Change] = &[Change::must("NetworkNumber", "")];

const fn gone(name: &'static str, operation: Operation) -> Row {
    Row {
        changes: NUMBERS,
        ..Row::whole(name, operation)
    }
}

/// Another process of the agent loads programs of its own, and replaces those of the former one.
const LOADED: &[Change] = &[Change::must("PodInterface", "programId")];

const fn loaded(name: &'static str, operation: Operation) -> Row {
    Row {
        changes: LOADED,
        ..Row::whole(name, operation)
    }
}

/// All other rows.
pub(super) const REST: [Row; 18] = [
    loaded("agents of node1 and node2 restarted", Operation::AgentRestarted),
    loaded(
        "agents of node1 and node2 killed, away for 1.5 s",
        Operation::AgentKilled,
    ),
    loaded("agents replaced, node after node", Operation::AgentsRolled),
    loaded(
        "a pod ends while the agent of its node is away",
        Operation::AgentAwayWhilePodEnds,
    ),
    Row::whole(
        "kni-controller killed, its Lease expires, and another one acts",
        Operation::ControllerReplaced,
    ),
    LABEL,
    Row::whole("API server killed, away for 1.5 s", Operation::ApiServerRestarted),
    Row::whole(
        "etcd restored to its state before the last Service",
        Operation::StorageRestored,
    ),
    registered("node3 registered again, its agent runs", Operation::RegisteredAgain),
    registered(
        "node3 registered again, then its agent starts",
        Operation::RegisteredBeforeAgent,
    ),
    registered(
        "agent of node3 starts, then it is registered again",
        Operation::RegisteredAfterAgent,
    ),
    Row::whole("node3 drained: a pod moves to node1", Operation::Drained),
    Row {
        changes: &[Change::must("NodeEndpoint", "spec.epoch")],
        ..Row::whole("MTU of node3 1400, and 1500 again", Operation::Narrowed)
    },
    Row {
        losses: &[(Class::Service, Loss::May), (Class::Opened, Loss::Must)],
        ..Row::whole("port of the Service changed, and changed back", Operation::PortChanged)
    },
    gone(
        "unused network exported, deleted, created again",
        Operation::NetworkExported,
    ),
    gone(
        "network deleted in use, then created again",
        Operation::NetworkDeletedInUse,
    ),
    gone(
        "network restored from a backup without status",
        Operation::NetworkRestored,
    ),
    gone(
        "namespace, pods, policy, and their network last",
        Operation::ReverseOrder,
    ),
];
