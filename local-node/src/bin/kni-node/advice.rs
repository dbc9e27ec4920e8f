//! Writes the paths and commands that a user of the nodes needs.

use std::path::Path;

use kni_local_node::image::PROBE;

use crate::state::Kind;

/// Paths and commands for what was started.
pub(crate) fn text(folder: &Path, kind: Kind) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    let folder = folder.strip_prefix(&here).unwrap_or(folder).display().to_string();
    match kind {
        Kind::Node => node(
            &folder,
            "",
            &format!(
                "{folder}/kubectl get pnw,nnw,pif -A -o wide\n  {folder}/kubectl apply -f deploy/examples/policies.yaml"
            ),
        ),
        Kind::Standalone => node(
            &folder,
            &format!("manifests   {folder}/manifests (networks, policies, services; the agent watches them)\n"),
            &format!("cp deploy/examples/policies.yaml {folder}/manifests/"),
        ),
        Kind::Cluster => cluster(&folder),
    }
}

fn node(folder: &str, source: &str, change: &str) -> String {
    format!(
        "kubeconfig  {folder}/kubeconfig
{source}logs        {folder}/logs

Try:
  {folder}/kubectl get nodes
  {folder}/kubectl run web --image={PROBE} --image-pull-policy=Never --port=7000 --expose -- serve --tcp 7000 --http 8080
  {folder}/kubectl run one --image={PROBE} --image-pull-policy=Never --annotations=kni.dev/network=blue -- serve --tcp 7000
  {folder}/kubectl get pods -o wide
  {folder}/kubectl exec web -- /kni-probe ask web 7000
  {change}
  {folder}/knictl interfaces
  {folder}/knictl flows --follow
  {folder}/import ARCHIVE          # an image archive of this machine, for pods with imagePullPolicy Never
  {folder}/enter bash              # a shell in the node's network and mounts
  cargo xtask node down"
    )
}

fn cluster(folder: &str) -> String {
    format!(
        "kubeconfig  {folder}/kubeconfig
deployed    {folder}/deploy, {folder}/networks (kubectl apply --server-side -k)
logs        {folder}/logs

Try:
  {folder}/kubectl get nodes,pods -A -o wide
  {folder}/kubectl create deployment web --image={PROBE} --replicas=6 --port=7000 -- /kni-probe serve --tcp 7000
  {folder}/kubectl expose deployment web
  {folder}/kubectl get pods -o wide
  {folder}/kubectl exec deployment/web -- /kni-probe ask web 7000
  {folder}/kubectl kni status
  {folder}/import ARCHIVE               # an image archive of this machine, into every node, for imagePullPolicy Never
  {folder}/enter node2 bash             # a shell in a node's network and mounts; also control-plane
  {folder}/enter router ip route        # the router between the nodes
  cargo xtask cluster down"
    )
}
