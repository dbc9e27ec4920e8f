//! Runs a cluster: a real API server and several nodes, each with an agent and a fake kubelet, on one fabric.

mod api_access;
pub mod audit;
mod controller;
mod data;
pub mod definitions;
mod fake_kubelet;
mod fault_proxy;
mod member;
pub mod objects;
mod pod_worker;
mod prepared;
mod rights;
mod tended;
pub mod truth;
pub mod wire;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
pub use api_access::connect;
pub use controller::Controller;
pub use definitions::deployed;
pub use fake_kubelet::FakeKubelet;
pub use fault_proxy::{Fault, FaultProxy, Faults, Rule};
use k8s_openapi::api::core::v1::Pod as PodObject;
use kni_api::NetworkNumber;
use kni_local_node::{ControlPlane, Fabric, Nodes, Part};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
pub use member::{Member, MemberOptions};
use prepared::Prepared;
pub use rights::token;
use serde_json::Value;
pub use tended::{HELD, Refusal};

use crate::{
    kubelet::Pod,
    machine::{programs, static_programs, tools},
    wait,
};

pub use crate::wait::patience;

/// The control plane and its nodes. The fields are dropped in this order.
pub struct Cluster {
    /// The nodes; the first one is `node1`.
    pub nodes: Vec<Member>,
    /// The replicas of kni-controller; [`Cluster::start_controller`] adds one.
    pub controllers: Vec<Controller>,
    /// The client of the administrator.
    pub client: Client,
    /// The API server and its dependencies.
    pub control: ControlPlane,
    /// The network that connects them.
    pub fabric: Fabric,
}

impl Cluster {
    /// A cluster of `nodes` nodes with ready agents. `name` appears in messages only.
    pub async fn start(name: &str, nodes: usize) -> Result<Self> {
        let mut cluster = Self::without_nodes(name).await?;
        for _node in 0..nodes {
            cluster.add_node(MemberOptions::default()).await?;
        }
        Ok(cluster)
    }

    /// Only the control plane, with the definitions of all objects, the permissions of the deployment, and one replica
    /// of kni-controller. The objects are those of a control plane that was prepared once.
    pub async fn without_nodes(name: &str) -> Result<Self> {
        let fabric = Fabric::new(name)?;
        let logs = tools()?.join("logs").join(format!("{}-{name}", std::process::id()));
        let programs = (&programs()?, &static_programs()?);
        let prepared = Box::pin(Prepared::find()).await?;
        let nodes = Nodes::WithoutKubelets;
        let mut control = ControlPlane::start_from(prepared.folder(), &fabric, nodes, programs, &logs)?;
        drop(prepared);
        let client = connect(fabric.inside(), &control.kubeconfig("test", "system:masters")?).await?;
        let mut cluster = Self {
            nodes: Vec::new(),
            controllers: Vec::new(),
            client,
            control,
            fabric,
        };
        Box::pin(prepared::admit(&cluster.client)).await?;
        cluster.start_controller().await?;
        Ok(cluster)
    }

    /// Starts another replica of kni-controller, beside the API server.
    pub async fn start_controller(&mut self) -> Result<&mut Controller> {
        self.start_controller_with(&[]).await
    }

    /// [`Self::start_controller`] with additional arguments.
    pub async fn start_controller_with(&mut self, args: &[&str]) -> Result<&mut Controller> {
        let token = token(&self.client, controller::ACCOUNT, None).await?;
        let kubeconfig = self.control.token_kubeconfig(&token);
        let name = format!("controller{}", self.controllers.len() + 1);
        let started = Controller::start(self.control.node(), &name, &kubeconfig, args)?;
        self.controllers.push(started);
        self.controllers.last_mut().context("just pushed")
    }

    /// Registers a node at the API server, and starts its agent and its fake kubelet.
    pub async fn add_node(&mut self, options: MemberOptions) -> Result<&mut Member> {
        let number = self.nodes.len() + 1;
        let member = Member::join(&self.fabric, &self.control, &self.client, number, options).await?;
        self.nodes.push(member);
        self.nodes.last_mut().context("just pushed")
    }

    /// Creates objects, or updates existing ones to `objects`.
    pub async fn apply(&self, objects: &[Value]) -> Result<()> {
        for object in objects {
            self.apply_one(object).await?;
        }
        Ok(())
    }

    /// [`Self::apply`] of one object; returns the resulting object.
    pub async fn apply_one(&self, object: &Value) -> Result<DynamicObject> {
        let (api, name) = self.place(object)?;
        let params = PatchParams::apply("test").force();
        let applied = api.patch(&name, &params, &Patch::Apply(object)).await;
        applied.with_context(|| format!("apply {object}"))
    }

    /// Deletes an applied object; a missing object is not an error.
    pub async fn delete(&self, object: &Value) -> Result<()> {
        let (api, name) = self.place(object)?;
        match api.delete(&name, &DeleteParams::default()).await {
            Ok(_status) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error).with_context(|| format!("delete {object}")),
        }
    }

    /// The current state of an applied object.
    pub async fn get(&self, object: &Value) -> Result<Option<DynamicObject>> {
        let (api, name) = self.place(object)?;
        Ok(api.get_opt(&name).await?)
    }

    fn place(&self, object: &Value) -> Result<(Api<DynamicObject>, String)> {
        let (resource, namespace, name) = objects::locate(object)?;
        let api = match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), &namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        };
        Ok((api, name))
    }

    /// Creates pods and waits until all of them run; returns them in the given order.
    pub async fn run(&self, pods: &[Value]) -> Result<Vec<Pod>> {
        let created = self.create_pods(pods).await?;
        let mut running = Vec::new();
        for pod in &created {
            running.push(
                self.running(&pod.namespace().unwrap_or_default(), &pod.name_any())
                    .await?,
            );
        }
        Ok(running)
    }

    /// Creates pods without waiting until they run.
    pub async fn create_pods(&self, pods: &[Value]) -> Result<Vec<PodObject>> {
        let mut created = Vec::new();
        for pod in pods {
            let object: PodObject = serde_json::from_value(pod.clone()).with_context(|| pod.to_string())?;
            let namespace = object.namespace().context("a pod without a namespace")?;
            let api: Api<PodObject> = Api::namespaced(self.client.clone(), &namespace);
            let made = api.create(&PostParams::default(), &object).await;
            created.push(made.with_context(|| format!("create {pod}"))?);
        }
        Ok(created)
    }

    /// Waits until a pod runs, and the API server has its status.
    pub async fn running(&self, namespace: &str, name: &str) -> Result<Pod> {
        wait::until_some(&format!("pod {namespace}/{name} runs"), patience(), async || {
            Ok(self
                .nodes
                .iter()
                .find_map(|node| node.kubelet.reported(namespace, name)))
        })
        .await
        .with_context(|| {
            let is_known = self.nodes.iter().any(|node| node.kubelet.knows(namespace, name));
            format!("known to a kubelet: {is_known}; {}", self.refusals())
        })
    }

    /// Deletes pods by name and waits until their objects are gone.
    pub async fn remove(&self, namespace: &str, names: &[&str]) -> Result<()> {
        let api: Api<PodObject> = Api::namespaced(self.client.clone(), namespace);
        for name in names {
            match api.delete(name, &DeleteParams::default()).await {
                Ok(_deleted) => (),
                Err(kube::Error::Api(status)) if status.is_not_found() => (),
                Err(error) => return Err(error).with_context(|| format!("delete pod {namespace}/{name}")),
            }
        }
        for name in names {
            wait::until(&format!("pod {namespace}/{name} is gone"), patience(), async || {
                Ok(api.get_opt(name).await?.is_none())
            })
            .await
            .with_context(|| self.refusals())?;
        }
        Ok(())
    }

    /// All refusals of the agents until now, for messages.
    pub fn refusals(&self) -> String {
        let mut last: BTreeMap<(&str, String, &str), (usize, Refusal)> = BTreeMap::new();
        for node in &self.nodes {
            for refusal in node.kubelet.refusals() {
                let key = (node.name.as_str(), refusal.pod.clone(), refusal.call);
                let count = last.get(&key).map_or(1, |(count, _)| count + 1);
                last.insert(key, (count, refusal));
            }
        }
        let lines = last
            .iter()
            .map(|((node, ..), (count, refusal))| format!("\n  {node}, {count} times: {refusal}"));
        format!("refused:{}", lines.collect::<String>())
    }

    /// All running pods, by namespace and name.
    pub fn all_running(&self) -> BTreeMap<(String, String), Pod> {
        let pods = self.nodes.iter().flat_map(|node| node.kubelet.running());
        pods.map(|pod| ((pod.namespace.clone(), pod.name.clone()), pod))
            .collect()
    }

    /// The numbers of the networks.
    pub async fn numbers(&self) -> Result<BTreeMap<u32, String>> {
        let api: Api<NetworkNumber> = Api::all(self.client.clone());
        let objects = api.list(&ListParams::default()).await?.items.into_iter();
        objects
            .map(|object| Ok((object.name_any().parse()?, object.spec.network)))
            .collect()
    }

    /// Kills the API server, as a crash would. A graceful stop would wait for its watchers for a minute.
    pub fn kill_api_server(&mut self) -> Result<()> {
        self.control.local().kill(Part::ApiServer)
    }

    /// Starts the API server again and waits until it is ready.
    pub fn start_api_server(&mut self) -> Result<()> {
        self.control.start_api_server()
    }
}
