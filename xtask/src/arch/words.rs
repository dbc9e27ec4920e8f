//! Lists the retired words and phrases with their replacements and the contexts in which they are allowed.

/// A word that identifiers of this project must not contain.
pub(super) struct Word {
    /// Its parts, in lower case: `["way", "out"]` matches `way_out` and `WayOut`.
    pub(super) parts: &'static [&'static str],
    /// The replacement.
    pub(super) instead: &'static str,
    /// Leading folders of the files where the word is retired; empty for everywhere.
    pub(super) only_in: &'static [&'static str],
    /// Whole identifiers that are allowed.
    pub(super) allowed: &'static [&'static str],
}

const fn word(parts: &'static [&'static str], instead: &'static str) -> Word {
    Word {
        parts,
        instead,
        only_in: &[],
        allowed: &[],
    }
}

const fn word_in(parts: &'static [&'static str], instead: &'static str, only_in: &'static [&'static str]) -> Word {
    Word {
        parts,
        instead,
        only_in,
        allowed: &[],
    }
}

/// Words of identifiers.
pub(super) const WORDS: &[Word] = &[
    word(&["story"], "trace, or flow event"),
    word(&["stories"], "traces, or flow events"),
    word(&["seat"], "attach point"),
    word(&["seats"], "attach points"),
    word(&["hasty"], "provisional"),
    word(&["haste"], "provisional"),
    word(&["promise"], "commit_ready"),
    word(&["promised"], "commit_ready"),
    word(&["settle"], "wait_for_carrier"),
    word_in(&["touch"], "note_activity", &["kni-agent"]),
    word(&["speed", "up"], "attach_xdp"),
    word(&["lend"], "move_device"),
    word(&["lent"], "move_device"),
    word(&["further"], "additional"),
    // Not in kni-common: a field of the event records keeps its name, which maps show (BTF).
    word_in(
        &["beyond"],
        "external",
        &[
            "kni-agent",
            "kni-api",
            "kni-cni",
            "kni-ebpf",
            "knictl",
            "local-node",
            "tests",
            "xtask",
        ],
    ),
    word(&["way", "out"], "egress"),
    word_in(
        &["asked"],
        "the noun: EgressLookup, request",
        &["kni-agent", "kni-ebpf", "kni-common"],
    ),
    word_in(
        &["said"],
        "the noun: Decisions, answer",
        &["kni-agent", "kni-ebpf", "kni-common"],
    ),
    word_in(
        &["led"],
        "the noun: ServiceBackend",
        &["kni-agent", "kni-ebpf", "kni-common"],
    ),
    word_in(
        &["left"],
        "foreign, masqueraded",
        &["kni-agent/model", "kni-agent/crd", "kni-ebpf", "kni-common"],
    ),
    word_in(
        &["known"],
        "cache, state",
        &["kni-agent/controllers", "kni-agent/cluster"],
    ),
    word(&["standin"], "substitute"),
    word(&["stand", "in"], "substitute"),
    word(&["stand", "ins"], "substitutes"),
    word(&["hungry"], "needs_block"),
    word(&["starving"], "needs_block"),
    word(&["reborn"], "recreated"),
    word(&["everybody"], "wildcard"),
    word(&["nobody"], "none, unknown"),
    word(&["somebody"], "any, other"),
    word(&["whoever"], "caller, peer"),
    word(&["why", "not"], "LeaseError, reason"),
    word(&["why", "empty"], "NoBackendReason"),
    word(&["doubt"], "unconfirmed"),
    word(&["doubts"], "unconfirmed"),
    word(&["doubtful"], "unconfirmed"),
    word(&["forget"], "remove, evict, release"),
    word(&["forgets"], "removes, evicts, releases"),
    word(&["tell"], "report"),
    word(&["tells"], "reports"),
    word(&["told"], "reported"),
    word_in(&["bring"], "apply", &["kni-agent"]),
    word_in(&["wanted"], "desired", &["kni-agent", "kni-ebpf", "kni-common"]),
    word(&["into", "force"], "apply, enforce"),
    word(&["in", "force"], "applied, enforced, active"),
    word_in(&["standing"], "health, status", &["kni-agent"]),
    word(&["policy", "sync"], "enforcement"),
    word_in(&["feed"], "sync", &["kni-agent/controllers"]),
    word_in(&["follow"], "watch, reflect", &["kni-agent/controllers"]),
    word_in(&["kinds"], "resources", &["kni-agent/controllers"]),
    word(&["house"], "the project, the node"),
    word(&["judge"], "evaluate, check"),
    word(&["judges"], "evaluates, checks"),
    word(&["judged"], "evaluated, checked"),
    word(&["judgement"], "evaluation, verdict"),
    word(&["says"], "reports, contains"),
    word(&["everyone"], "wildcard, all"),
    word(&["someone"], "any, other"),
    word(&["goes", "on"], "continues, passes"),
    word(&["went", "on"], "continued, passed"),
    word_in(&["answer"], "reply", &["kni-ebpf", "kni-common"]),
    word_in(
        &["question"],
        "original direction, request",
        &["kni-ebpf", "kni-common"],
    ),
];

/// A phrase that comments and pages must not contain.
pub(super) struct Phrase {
    /// In lower case, as whole words.
    pub(super) text: &'static str,
    /// The replacement.
    pub(super) instead: &'static str,
    /// Longer texts that contain the phrase and are allowed, in lower case.
    pub(super) allowed: &'static [&'static str],
    /// Leading folders of the files where the phrase is retired; empty for everywhere.
    pub(super) only_in: &'static [&'static str],
}

const fn phrase(text: &'static str, instead: &'static str) -> Phrase {
    phrase_in(text, instead, &[])
}

const fn phrase_in(text: &'static str, instead: &'static str, only_in: &'static [&'static str]) -> Phrase {
    Phrase {
        text,
        instead,
        allowed: &[],
        only_in,
    }
}

/// Phrases of comments and pages.
pub(super) const PHRASES: &[Phrase] = &[
    phrase("nobody", "no process, no caller, nothing; or the passive"),
    phrase("somebody", "another process, a user"),
    phrase("everybody", "all, every client"),
    phrase("whoever", "the caller, the process that"),
    phrase("told", "reported, notified, passed"),
    phrase("tells", "reports, shows, describes"),
    Phrase {
        text: "says",
        instead: "reports, states, contains, describes",
        allowed: &[],
        only_in: &[],
    },
    phrase("said", "reported, stated"),
    Phrase {
        text: "stands",
        instead: "is, is listed, is placed",
        allowed: &["stands for"],
        only_in: &[],
    },
    phrase("in haste", "provisionally"),
    phrase("way out", "egress"),
    phrase("ways out", "egress paths"),
    phrase("goes on", "continues"),
    phrase("go on", "continue"),
    phrase("into force", "apply, enforce"),
    phrase("in force", "applied, enforced, active"),
    phrase("last word of", "latest state from"),
    Phrase {
        text: "house",
        instead: "project, node",
        allowed: &["in-house"],
        only_in: &[],
    },
    phrase("hungry", "needs a block"),
    phrase("starving", "needs a block"),
    phrase("reborn", "recreated"),
    phrase("story", "trace, flow event"),
    phrase("stories", "traces, flow events"),
    phrase("hasty", "provisional"),
    phrase("tell", "report, show, describe, distinguish"),
    phrase("stand-in", "substitute"),
    phrase("stand-ins", "substitutes"),
    phrase("forgets", "removes, evicts, releases"),
    phrase("forgotten", "removed, evicted, released"),
    phrase("forget", "remove, evict, release"),
    phrase("in doubt", "unconfirmed"),
    phrase("doubtful", "unconfirmed"),
    phrase("heard", "received, reported"),
    phrase("hears", "receives"),
    phrase("someone", "another process, a user"),
    phrase("everyone", "all, every client"),
    phrase("anybody", "any process, any client"),
    phrase("further interface", "additional interface"),
    phrase("further interfaces", "additional interfaces"),
    phrase("complain", "report"),
    phrase("complains", "reports"),
    phrase("judge", "evaluate, check"),
    phrase("judges", "evaluates, checks"),
    phrase("judged", "evaluated, checked"),
    phrase("judging", "evaluating, checking"),
    phrase("judgement", "evaluation, verdict"),
    phrase("went on", "continued, passed"),
    phrase("gone on", "continued, passed"),
    phrase("going on", "continuing, in progress"),
    phrase("beyond", "external, outside"),
    phrase("wanted", "desired, requested"),
    phrase("doubt", "unconfirmed"),
    phrase("doubts", "unconfirmed"),
    phrase("seat", "attach point"),
    phrase("seats", "attach points"),
    phrase_in("answer", "reply", PACKETS),
    phrase_in("answers", "replies", PACKETS),
    phrase_in("question", "original direction, request", PACKETS),
    phrase_in("questions", "original direction, requests", PACKETS),
];

/// Crates whose prose is about packets.
const PACKETS: &[&str] = &["kni-ebpf", "kni-common"];
