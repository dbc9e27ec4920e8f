//! Compares attached interfaces with the kernel: programs, rows, counters, and the state in the pod and on the node.

use std::sync::Arc;

use kni_dataplane::EndpointConfig;
use kni_model::{
    Attachment, InterfaceKind, Sandbox,
    view::{EndpointCounts, InterfaceFilter, InterfaceView, ProgramView},
};
use kni_pods::{host_end_exists, problems_without_row};

use crate::{Inspector, inside::problems_inside};

impl Inspector {
    /// Attached interfaces, compared with the kernel. Takes some microseconds for each; a millisecond for those of a
    /// selected sandbox, which are compared thoroughly. Blocks: call it on a blocking thread.
    pub fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        let mut selected = self.pods.attachments();
        selected.retain(|(sandbox, attachment)| matches(filter, sandbox, attachment));
        selected.sort_by(|(a, x), (b, y)| (&a.pod, &a.id, x.endpoint).cmp(&(&b.pod, &b.id, y.endpoint)));
        let thoroughly = !filter.sandbox.is_empty();
        let mut views = Vec::new();
        for (sandbox, attachment) in selected {
            let mut view = self.interface(sandbox, attachment);
            if thoroughly {
                let problems = problems_inside(&self.netlink, &view.sandbox, &view.attachment);
                view.problems.extend(problems);
            }
            views.push(view);
        }
        views
    }

    fn interface(&self, sandbox: Arc<Sandbox>, attachment: Attachment) -> InterfaceView {
        // Read before the programs, so that filters are never taken for what stays.
        let provisional = self.dataplane.is_provisional(attachment.endpoint);
        let mut view = InterfaceView {
            sandbox,
            attachment,
            programs: Vec::new(),
            provisional,
            counts: EndpointCounts::default(),
            problems: Vec::new(),
        };
        if view.attachment.kind.has_row() {
            self.read_row(&mut view);
        }
        if !matches!(view.attachment.kind, InterfaceKind::Veth) {
            let problems = problems_without_row(&view.sandbox, &view.attachment);
            view.problems.extend(problems);
        }
        view
    }

    /// Programs, row and counters of an interface.
    fn read_row(&self, view: &mut InterfaceView) {
        let attachment = &view.attachment;
        let (programs, problems) = self.programs(attachment);
        view.programs = programs;
        view.problems = problems;
        view.problems
            .extend(self.dataplane.verify(&EndpointConfig::from(attachment)));
        match self.dataplane.counts(attachment.endpoint) {
            Ok(counts) => view.counts = counts,
            Err(error) => view.problems.push(error.to_string()),
        }
    }

    fn programs(&self, attachment: &Attachment) -> (Vec<ProgramView>, Vec<String>) {
        let Attachment {
            host_ifname,
            host_ifindex,
            endpoint,
            ..
        } = attachment;
        let (mut programs, mut problems) = if host_end_exists(attachment) {
            self.dataplane.programs(host_ifname.as_str(), *endpoint)
        } else {
            (Vec::new(), vec![format!("host interface {host_ifname} does not exist")])
        };
        if attachment.xdp {
            let dataplane = &self.dataplane;
            match dataplane.xdp_program(host_ifname.as_str(), *host_ifindex, *endpoint) {
                Ok(program) => programs.push(program),
                Err(problem) => problems.push(problem.to_string()),
            }
        }
        (programs, problems)
    }
}

fn matches(filter: &InterfaceFilter, sandbox: &Sandbox, attachment: &Attachment) -> bool {
    let InterfaceFilter {
        pod_namespace,
        pod_name,
        network,
        sandbox: id,
    } = filter;
    let selects = |selector: &str, found: &str| selector.is_empty() || selector == found;
    selects(pod_namespace, &sandbox.pod.namespace)
        && selects(pod_name, &sandbox.pod.name)
        && selects(network, attachment.network.as_str())
        && selects(id, sandbox.id.as_str())
}
