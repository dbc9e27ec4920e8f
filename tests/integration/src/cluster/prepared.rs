//! Prepares the data of a control plane once for all clusters: the API server's own objects, the definitions, the
//! permissions of the deployment.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{
    core::v1::{ConfigMap, Namespace, ServiceAccount},
    rbac::v1::ClusterRole,
};
use kni_api::AddressBlock;
use kni_claims::{NetworkRef, NodeRef, address_block};
use kni_local_node::{ControlPlane, Fabric, Nodes};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PostParams},
};

use super::{api_access::connect, definitions, patience, rights};
use crate::{
    machine::{programs, static_programs, tools},
    wait,
};

/// The group of our kinds, and its version.
const GROUP: &str = "kni.dev";
const VERSION: &str = "kni.dev/v1alpha1";
/// Roles to which the controllers add the rules of others.
const AGGREGATED: [&str; 3] = ["admin", "edit", "view"];

/// The data of a prepared control plane. While the value lives no other process removes it.
#[derive(Debug)]
pub(super) struct Prepared {
    folder: PathBuf,
    _lock: File,
}

impl Prepared {
    /// The data for the current programs, definitions and permissions. The first process that needs it prepares it, and
    /// removes that of others.
    pub(super) async fn find() -> Result<Self> {
        let all = tools()?.join("control-planes");
        fs::create_dir_all(&all).with_context(|| format!("create {}", all.display()))?;
        let folder = all.join(key()?);
        // Locked until the file is closed, at the latest when the process ends.
        let path = all.join("lock");
        let open = || File::create(&path).with_context(|| format!("create {}", path.display()));
        loop {
            let lock = open()?;
            lock.lock_shared().with_context(|| format!("lock {}", path.display()))?;
            if folder.exists() {
                return Ok(Self { folder, _lock: lock });
            }
            drop(lock);
            let lock = open()?;
            lock.lock().with_context(|| format!("lock {}", path.display()))?;
            if !folder.exists() {
                remove_folders(&all)?;
                let unfinished = all.join("unfinished");
                prepare(&unfinished).await.context("prepare a control plane")?;
                fs::rename(&unfinished, &folder).with_context(|| format!("rename {}", unfinished.display()))?;
            }
        }
    }

    /// Its folder, for [`ControlPlane::start_from`].
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Applies the policies of admission, and waits until they are enforced.
///
/// They are no part of the data: an API server that starts with policies may look for the kinds of their parameters
/// before it serves these. Then it refuses all objects that the policies are about, and retries after half a minute.
pub(super) async fn admit(client: &Client) -> Result<()> {
    wait::until(
        "the API server names the kinds of the parameters",
        patience(),
        async || {
            let groups = client.list_api_groups().await?.groups;
            let ours = client.list_api_group_resources(VERSION).await?.resources;
            Ok(groups.iter().any(|group| group.name == GROUP) && ours.iter().any(|kind| kind.kind == "PodNetwork"))
        },
    )
    .await?;
    rights::admit(client).await?;
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let (name, uid) = ("nowhere".to_owned(), "none".to_owned());
    // There is no such network.
    let network = NetworkRef {
        name: name.parse()?,
        uid: uid.clone(),
    };
    let block = address_block(&NodeRef { name, uid }, &network, &"10.0.0.0/26".parse()?);
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    wait::eventually(patience(), async || {
        let created = blocks.create(&params, &block).await;
        let text = created.err().context("accepted")?.to_string();
        let configured = text.contains("denied request") && !text.contains("failed to configure policy");
        ensure!(configured, "{text}");
        Ok(())
    })
    .await
    .context("the policies of admission are not enforced")
}

/// Identifies everything that the data depends on.
fn key() -> Result<String> {
    let mut hash = DefaultHasher::new();
    ControlPlane::data_version(&programs()?).hash(&mut hash);
    let objects = definitions::all()?.into_iter().chain(rights::permissions()?);
    objects.for_each(|object| object.to_string().hash(&mut hash));
    Ok(format!("{:016x}", hash.finish()))
}

fn remove_folders(all: &Path) -> Result<()> {
    for entry in fs::read_dir(all).with_context(|| format!("read {}", all.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Runs a control plane until it has every object, and saves its data.
async fn prepare(folder: &Path) -> Result<()> {
    let fabric = Fabric::new("prepared")?;
    let logs = tools()?.join("logs").join(format!("{}-prepared", std::process::id()));
    let (nodes, statics) = (Nodes::WithoutKubelets, static_programs()?);
    let mut control = ControlPlane::start(&fabric, nodes, &programs()?, &statics, &logs)?;
    let client = connect(fabric.inside(), &control.kubeconfig("test", "system:masters")?).await?;
    definitions::install(&client).await?;
    rights::grant(&client).await?;
    wait::until("the controllers have made their objects", patience(), async || {
        has_objects_of_controllers(&client).await
    })
    .await?;
    drop(client);
    control.save(folder)
}

async fn has_objects_of_controllers(client: &Client) -> Result<bool> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let listed = namespaces.list(&ListParams::default()).await?;
    ensure!(!listed.items.is_empty(), "no namespace");
    for namespace in listed {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace.name_any());
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace.name_any());
        let found = (
            accounts.get_opt("default").await?,
            maps.get_opt("kube-root-ca.crt").await?,
        );
        if !matches!(found, (Some(_), Some(_))) {
            return Ok(false);
        }
    }
    let roles: Api<ClusterRole> = Api::all(client.clone());
    for name in AGGREGATED {
        if roles.get(name).await?.rules.unwrap_or_default().is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}
