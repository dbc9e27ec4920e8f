//! Makes sandboxes for one case, checks their state in the kernel, and removes all of them afterwards.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
};

use kni_proto::kni::{AttachInterfaceRequest, CreateNetworkRequest};

use crate::{
    client::Client,
    error::{Failure, Result, require},
    links::{self, Link},
    namespace::{self, Netns},
    sandbox::{NAMESPACE, PRIMARY, Pod, Sandbox, addresses},
    wait::eventually,
};

/// The server under test, and what a case has made there.
pub(crate) struct Session {
    /// The connection of the kubelet.
    pub(crate) client: Client,
    /// The socket, for more connections.
    pub(crate) socket: PathBuf,
    /// The namespace of the server's host.
    pub(crate) host: Netns,
    /// The names of the interfaces of every new namespace.
    initial_links: BTreeSet<String>,
    made: RefCell<Made>,
}

/// The ids and paths that a case has used.
#[derive(Default)]
struct Made {
    ids: Vec<String>,
    paths: Vec<String>,
}

impl Session {
    pub(crate) async fn open(socket: &Path) -> Result<Self> {
        let initial = links::links(&Netns::fresh().await?).await?;
        Ok(Self {
            client: Client::new(socket),
            socket: socket.to_owned(),
            host: Netns::current()?,
            initial_links: initial.into_iter().map(|link| link.name).collect(),
            made: RefCell::default(),
        })
    }

    /// `CreateNetwork` with the names of a pod, as the kubelet calls it; the namespace is checked.
    pub(crate) async fn sandbox(&self, name: &str) -> Result<Sandbox> {
        let request = CreateNetworkRequest {
            name: name.to_owned(),
            namespace: NAMESPACE.to_owned(),
            ..CreateNetworkRequest::default()
        };
        self.sandbox_of(name, request).await
    }

    /// [`Self::sandbox`] with the given request.
    pub(crate) async fn sandbox_of(&self, name: &str, request: CreateNetworkRequest) -> Result<Sandbox> {
        let path = self.client.create(request).await?.netns_path;
        self.adopt(name, path).await
    }

    /// A sandbox in the namespace at a path that the server has returned.
    pub(crate) async fn adopt(&self, name: &str, path: String) -> Result<Sandbox> {
        self.made.borrow_mut().paths.push(path.clone());
        let netns = Netns::mounted(&path).await?;
        require!(!netns.is(&self.host), "{path} is the network namespace of the host");
        let sandbox = Sandbox::new(name, path, netns);
        self.note_id(&sandbox.id);
        Ok(sandbox)
    }

    /// A pod: create and attach as the kubelet does.
    pub(crate) async fn pod(&self, name: &str) -> Result<Pod> {
        let sandbox = self.sandbox(name).await?;
        self.attach(sandbox).await
    }

    /// Attaches a sandbox as the kubelet does.
    pub(crate) async fn attach(&self, sandbox: Sandbox) -> Result<Pod> {
        let request = sandbox.attach_request();
        self.attach_by(sandbox, request).await
    }

    /// Attaches a sandbox with the given request.
    pub(crate) async fn attach_by(&self, sandbox: Sandbox, request: AttachInterfaceRequest) -> Result<Pod> {
        let interfaces = self.client.attach(request).await?.ipconfigs;
        Ok(Pod {
            addresses: addresses(&interfaces)?,
            sandbox,
            interfaces,
        })
    }

    /// Notes an id, so that the cleanup removes what it names.
    pub(crate) fn note_id(&self, id: &str) {
        self.made.borrow_mut().ids.push(id.to_owned());
    }

    /// Detaches and deletes as the kubelet does.
    pub(crate) async fn remove(&self, sandbox: &Sandbox) -> Result<()> {
        self.client.detach_id(&sandbox.id).await?;
        self.client.delete_id(&sandbox.id).await
    }

    /// Removes everything that the case has made; failures are ignored, because cases of their own find them.
    pub(crate) async fn clean_up(&self) {
        let Made { ids, paths } = self.made.take();
        for id in ids {
            self.client.detach_id(&id).await.ok();
            self.client.delete_id(&id).await.ok();
        }
        for path in paths {
            if Path::new(&path).exists() {
                self.client.delete_path(&path).await.ok();
            }
            namespace::unmount(&path);
        }
    }

    /// Checks that `eth0` of the pod works and has exactly the answered addresses.
    pub(crate) async fn check_pod(&self, pod: &Pod) -> Result<()> {
        let eth0 = attached(&pod.sandbox.netns).await?;
        let actual: BTreeSet<IpAddr> = eth0.addresses.iter().map(|address| address.ip).collect();
        let answered: BTreeSet<IpAddr> = pod.addresses.iter().copied().collect();
        require!(
            actual == answered,
            "{PRIMARY} has the addresses {actual:?}, answered were {answered:?}"
        );
        for address in &eth0.addresses {
            require!(address.usable, "{} of {PRIMARY} is not usable yet", address.ip);
        }
        let mac = pod.interfaces.get(PRIMARY).map(|config| config.mac.to_lowercase());
        let mac = mac.filter(|mac| !mac.is_empty());
        require!(
            mac.as_ref().is_none_or(|mac| *mac == eth0.mac),
            "{PRIMARY} has the MAC address {}, answered was {mac:?}",
            eth0.mac
        );
        Ok(())
    }

    /// Checks that a query answers as the attach did.
    pub(crate) async fn check_query(&self, pod: &Pod) -> Result<()> {
        let queried = addresses(&self.client.query(&pod.sandbox.id).await?.ipconfigs)?;
        require!(
            queried == pod.addresses,
            "QueryPodNetwork answers {queried:?}, AttachInterface answered {:?}",
            pod.addresses
        );
        Ok(())
    }

    /// Checks that a query of the id is answered with nothing.
    pub(crate) async fn check_unknown(&self, id: &str) -> Result<()> {
        let known = self.client.query(id).await?.ipconfigs;
        require!(known.is_empty(), "QueryPodNetwork answers {known:?} for {id:?}");
        Ok(())
    }

    /// Waits until the namespace has no other interfaces than a new one.
    pub(crate) async fn check_bare(&self, netns: &Netns) -> Result<()> {
        eventually(async || {
            let links = links::links(netns).await?;
            let more = links.iter().find(|link| !self.initial_links.contains(&link.name));
            match more {
                None => Ok(()),
                Some(link) => Err(Failure::Wrong(format!(
                    "interface {} is still in the pod's namespace",
                    link.name
                ))),
            }
        })
        .await
    }

    /// Waits until nothing exists at the path of a deleted namespace.
    pub(crate) async fn check_path_gone(&self, path: &str) -> Result<()> {
        eventually(async || {
            let exists = Path::new(path).symlink_metadata().is_ok();
            require!(!exists, "the deleted namespace path {path} still exists");
            Ok(())
        })
        .await
    }

    /// The interfaces of the host whose other end is also there: pairs that no pod has received.
    pub(crate) async fn host_pairs(&self) -> Result<BTreeMap<u32, String>> {
        let links = links::links(&self.host).await?;
        let pairs = links.into_iter().filter(|link| link.has_near_peer);
        Ok(pairs.map(|link| (link.index, link.name)).collect())
    }

    /// Waits until the host has no pairs but those of `before`.
    pub(crate) async fn check_host_pairs(&self, before: &BTreeMap<u32, String>) -> Result<()> {
        eventually(async || {
            let mut now = self.host_pairs().await?;
            now.retain(|index, _| !before.contains_key(index));
            require!(now.is_empty(), "new interfaces stay in the host: {:?}", now.values());
            Ok(())
        })
        .await
    }
}

/// `eth0` of a namespace, which must be up, as `lo` must.
pub(crate) async fn attached(netns: &Netns) -> Result<Link> {
    let links = links::links(netns).await?;
    let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
    let find = |name: &str| links.iter().find(|link| link.name == name);
    let Some(eth0) = find(PRIMARY) else {
        return Err(Failure::Wrong(format!(
            "the namespace has no {PRIMARY} after AttachInterface, only {names:?}"
        )));
    };
    require!(eth0.up, "{PRIMARY} is not up after AttachInterface");
    require!(eth0.carrier, "{PRIMARY} has no carrier after AttachInterface");
    require!(find("lo").is_some_and(|lo| lo.up), "lo is not up after AttachInterface");
    Ok(eth0.clone())
}
