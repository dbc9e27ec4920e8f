//! Provides the cluster of the table: two editors, each of one namespace, and two victims in namespaces of others.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster, Pod,
    cluster::{MemberOptions, connect, deployed, objects, patience},
    traffic::Servers,
    wait,
};
use kube::Client;
use serde_json::{Value, json};

use super::{
    super::{
        request::{Request, Verb},
        scene::{PORT, address, serve, wait_for_condition},
    },
    row::Form,
    victim::Victim,
};

/// Rows of the table of Services: fewer than by default, so that an attempt is quick.
const SERVICES: &str = "512";
/// Rows of each table of policies; an eighth of them is the quota of a namespace.
const POLICY_ROWS: &str = "8192";
/// A host outside, at which a server answers.
const OUTSIDE: &str = "198.51.100.1";
/// The label of everything that editors make in a row.
pub(super) const ATTEMPT: &str = "attempt";

/// An editor of one namespace.
pub(super) struct Editor {
    pub(super) user: &'static str,
    pub(super) client: Client,
    pub(super) form: Form,
    /// A pod of the namespace, with the labels of the pods that the victims' policies allow.
    pub(super) probe: Pod,
    _server: Servers,
}

/// Two nodes with the editors and their victims.
pub(super) struct Scene {
    pub(super) cluster: Cluster,
    pub(super) editors: [Editor; 2],
    /// A tenant with a network of its own, and one in the default network.
    pub(super) victims: [Victim; 2],
    pub(super) outside: Servers,
}

impl Scene {
    pub(super) async fn start(name: &str) -> Result<Self> {
        let mut cluster = Cluster::without_nodes(name).await?;
        for _node in 0..2 {
            let mut options = MemberOptions::default();
            let sizes = ["--max-services", SERVICES, "--max-policy-rows", POLICY_ROWS];
            options.args.extend(sizes.map(str::to_owned));
            cluster.add_node(options).await?;
        }
        for file in ["base/access.yaml", "base/in-use.yaml"] {
            cluster.apply(&deployed(file)?).await?;
        }
        cluster.apply(&networks()).await?;
        cluster.apply(&namespaces()).await?;
        for network in ["default", "vault", "own-a", "own-b", "shared", "granted"] {
            wait_for_condition(&cluster, network, "Programmed", true).await?;
        }
        cluster.apply(&rights()).await?;
        let outside = Servers::start(cluster.fabric.inside(), "outside", PORT)?;
        let vault = json!({ "kni.dev/network": "vault" });
        let victims = [
            Victim::start(&cluster, "victim", "vault", &vault).await?,
            Victim::start(&cluster, "plain", "default", &json!({})).await?,
        ];
        let [first, second] = &victims;
        let editors = [
            editor(&mut cluster, ("mallory", "a"), first, second).await?,
            editor(&mut cluster, ("trudy", "b"), first, second).await?,
        ];
        let scene = Self {
            cluster,
            editors,
            victims,
            outside,
        };
        scene.are_guarded().await?;
        Ok(scene)
    }

    /// The address of the host outside.
    pub(super) fn outside_address() -> IpAddr {
        OUTSIDE.parse().expect("an address")
    }

    /// Waits until the API server enforces what guards the victims: the rights of editors, and the policies of
    /// admission, of which it sees that of the test as the last.
    async fn are_guarded(&self) -> Result<()> {
        self.cluster.apply(&last_policy()).await?;
        let object = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "last", "namespace": "default" },
        });
        let create = Request::create(&object)?;
        wait::until("the last policy is enforced", patience(), async || {
            let outcome = create.send(&self.cluster.client, true).await?;
            let is_configured = !outcome.message.contains("failed to configure");
            ensure!(outcome.message.contains("denied request") && is_configured, "{outcome}");
            Ok(true)
        })
        .await?;
        for editor in &self.editors {
            let namespace = &editor.form.namespace;
            for kind in [
                "k8s.cni.cncf.io/v1/namespaces/{}/network-attachment-definitions",
                "kni.dev/v1alpha1/namespaces/{}/podnetworkattachments",
            ] {
                let path = format!("/apis/{}", kind.replace("{}", namespace));
                let delete = Request::new(Verb::Delete, &path, Value::Null);
                wait::until("an editor has the added rights", patience(), async || {
                    let outcome = delete.send(&editor.client, true).await?;
                    ensure!(outcome.code == 200, "{outcome}");
                    Ok(true)
                })
                .await?;
            }
        }
        Ok(())
    }
}

/// It refuses one object, once for each network.
fn last_policy() -> [Value; 2] {
    let version = "admissionregistration.k8s.io/v1";
    let rule =
        json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"] });
    let policy = json!({
        "apiVersion": version, "kind": "ValidatingAdmissionPolicy", "metadata": { "name": "last.test" },
        "spec": {
            "failurePolicy": "Fail",
            "paramKind": { "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork" },
            "matchConstraints": { "resourceRules": [rule] },
            "validations": [{ "expression": "object.metadata.name != 'last' || params.metadata.name == ''" }],
        },
    });
    let binding = json!({
        "apiVersion": version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": { "name": "last.test" },
        "spec": {
            "policyName": "last.test", "validationActions": ["Deny"],
            "paramRef": { "selector": {}, "parameterNotFoundAction": "Deny" },
        },
    });
    [policy, binding]
}

/// The networks: of the victim, of each editor, one for all, and one whose accounts need a verb.
fn networks() -> Vec<Value> {
    let of = |tenant: &str| json!({ "matchLabels": { "tenant": tenant } });
    let all = json!({ "namespaces": { "from": "All" } });
    let more = json!({ "default": true, "egress": { "mode": "Masquerade" } });
    let small = json!({ "perNodePrefix": { "ipv4": 29 } });
    let mut own_a = json!({ "access": { "namespaces": { "from": "Selected", "selector": of("a") } } });
    let mut own_b = json!({ "namespaceSelector": of("b") });
    let mut shared = json!({ "access": all });
    for spec in [&mut own_a, &mut own_b, &mut shared] {
        objects::merge(spec, &small);
    }
    let mut granted = all;
    granted["requireJoin"] = json!(true);
    vec![
        objects::network_without_access("default", &["10.244.0.0/16", "fd00:244::/64"], &more),
        objects::network_without_access(
            "vault",
            &["10.10.0.0/16", "fd10::/64"],
            &json!({ "namespaceSelector": of("victim") }),
        ),
        objects::network_without_access("own-a", &["10.30.0.0/28"], &own_a),
        objects::network_without_access("own-b", &["10.31.0.0/28"], &own_b),
        objects::network_without_access("shared", &["10.40.0.0/28"], &shared),
        objects::network_without_access("granted", &["10.50.0.0/24"], &json!({ "access": granted })),
    ]
}

fn namespaces() -> Vec<Value> {
    let of = |name: &str, labels: Value| objects::namespace(name, &labels);
    vec![
        of("victim", json!({ "tenant": "victim" })),
        of("plain", json!({})),
        of("a", json!({ "tenant": "a" })),
        of("b", json!({ "tenant": "b" })),
        objects::attachment_definition("victim", "door", "vault"),
    ]
}

/// Each user edits one namespace. As at many sites, `edit` also has the kinds of Multus and slices of endpoints.
fn rights() -> Vec<Value> {
    let group = "rbac.authorization.k8s.io";
    let every = [
        "get",
        "list",
        "watch",
        "create",
        "update",
        "patch",
        "delete",
        "deletecollection",
    ];
    let added = json!({
        "apiVersion": format!("{group}/v1"),
        "kind": "ClusterRole",
        "metadata": { "name": "site-edit", "labels": { format!("{group}/aggregate-to-edit"): "true" } },
        "rules": [
            { "apiGroups": ["k8s.cni.cncf.io"], "resources": ["*"], "verbs": every },
            { "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": every },
        ],
    });
    let bound = [("mallory", "a"), ("trudy", "b")].map(|(user, namespace)| {
        json!({
            "apiVersion": format!("{group}/v1"),
            "kind": "RoleBinding",
            "metadata": { "name": user, "namespace": namespace },
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": "edit" },
            "subjects": [{ "apiGroup": group, "kind": "User", "name": user }],
        })
    });
    std::iter::once(added).chain(bound).collect()
}

async fn editor(
    cluster: &mut Cluster,
    (user, namespace): (&'static str, &str),
    first: &Victim,
    second: &Victim,
) -> Result<Editor> {
    let number = usize::from(namespace == "b");
    let node = format!("node{}", number + 1);
    let labels = json!({ "labels": { "friend": "yes" } });
    let probe = cluster
        .run(&[objects::pod_with(namespace, "probe", &node, &labels)])
        .await?
        .pop()
        .context("a probe")?;
    let server = serve(&probe)?;
    let kubeconfig = cluster.control.kubeconfig(user, "tenants")?;
    let form = Form {
        namespace: namespace.to_owned(),
        number,
        own: format!("own-{namespace}"),
        node,
        probe: address(&probe, true),
        target: [first.target()?, second.target()?],
        nodes: cluster
            .nodes
            .iter()
            .map(|node| node.node.addresses()[0].to_owned())
            .collect(),
    };
    Ok(Editor {
        user,
        client: connect(cluster.fabric.inside(), &kubeconfig).await?,
        form,
        probe,
        _server: server,
    })
}
