//! `chart`: generates the templates of the Helm chart from `deploy/base`, or checks that they are up to date.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};

use crate::workspace::root;

/// First line of a generated file.
const NOTICE: &str = "{{- /* Generated from deploy/base by `cargo xtask chart`; do not edit. */}}\n";
/// Files of `deploy/base` that become templates.
const FILES: [&str; 12] = [
    "rbac.yaml",
    "controller-rbac.yaml",
    "daemonset.yaml",
    "controller.yaml",
    "in-use.yaml",
    "access.yaml",
    "addressblocks.yaml",
    "agent-writes.yaml",
    "controller-writes.yaml",
    "tenants.yaml",
    "egress-claims.yaml",
    "flow-schemas.yaml",
];

/// Text of a file of `deploy/base`, and its replacement in the template. Each text is in at least one file.
const CHANGES: [(&str, &str); 11] = [
    ("namespace: kni-system", "namespace: {{ .Release.Namespace }}"),
    (
        "image: kni.local/kni-agent:0.1.0",
        "image: \"{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ \
         .Values.image.tag | default .Chart.AppVersion }}{{ end }}\"",
    ),
    (
        "imagePullPolicy: IfNotPresent",
        "imagePullPolicy: {{ .Values.image.pullPolicy }}",
    ),
    ("maxUnavailable: 10%", "maxUnavailable: {{ .Values.maxUnavailable }}"),
    (
        "        kni.dev/task: serve\n",
        "        kni.dev/task: serve\n      annotations:\n        # A change of the configuration rolls out the agents.\n        \
         kni.dev/config: {{ include (print $.Template.BasePath \"/configmap.yaml\") . | sha256sum }}\n        \
         {{- with .Values.podAnnotations }}\n        {{- toYaml . | nindent 8 }}\n        {{- end }}\n",
    ),
    (
        "            requests:\n              cpu: 50m\n              memory: 100Mi\n",
        "            {{- toYaml .Values.resources | nindent 12 }}\n",
    ),
    (
        "            requests:\n              cpu: 20m\n              memory: 50Mi\n",
        "            {{- toYaml .Values.controller.resources | nindent 12 }}\n",
    ),
    ("privileged: false", "privileged: {{ eq .Values.mode \"kni\" }}"),
    (
        "mountPropagation: HostToContainer",
        "mountPropagation: {{ eq .Values.mode \"kni\" | ternary \"Bidirectional\" \"HostToContainer\" }}",
    ),
    ("path: /opt/cni/bin\n", "path: {{ .Values.cni.binDir }}\n"),
    ("path: /etc/cni/net.d\n", "path: {{ .Values.cni.confDir }}\n"),
];

/// Changes of one file: the file, its text, and the replacement.
const CHANGES_OF: [(&str, &str, &str); 9] = [
    (
        "daemonset.yaml",
        "      priorityClassName: system-node-critical\n",
        "      priorityClassName: {{ .Values.priorityClassName }}\n      {{- with .Values.image.pullSecrets }}\n      \
         imagePullSecrets:\n        {{- toYaml . | nindent 8 }}\n      {{- end }}\n",
    ),
    (
        "daemonset.yaml",
        "        kubernetes.io/os: linux\n",
        "        {{- toYaml .Values.nodeSelector | nindent 8 }}\n",
    ),
    (
        "daemonset.yaml",
        "        - operator: Exists\n",
        "        {{- toYaml .Values.tolerations | nindent 8 }}\n      {{- with .Values.affinity }}\n      affinity:\n        \
         {{- toYaml . | nindent 8 }}\n      {{- end }}\n",
    ),
    (
        "controller.yaml",
        "      priorityClassName: system-cluster-critical\n",
        "      priorityClassName: {{ .Values.controller.priorityClassName }}\n      {{- with .Values.image.pullSecrets \
         }}\n      imagePullSecrets:\n        {{- toYaml . | nindent 8 }}\n      {{- end }}\n",
    ),
    (
        "controller.yaml",
        "        kubernetes.io/os: linux\n",
        "        {{- toYaml .Values.controller.nodeSelector | nindent 8 }}\n",
    ),
    (
        "controller.yaml",
        "  template:\n    metadata:\n",
        "  template:\n    metadata:\n      {{- with .Values.controller.podAnnotations }}\n      annotations:\n        {{- \
         toYaml . | nindent 8 }}\n      {{- end }}\n",
    ),
    (
        "controller.yaml",
        "      affinity:\n",
        "        {{- with .Values.controller.tolerations }}\n        {{- toYaml . | nindent 8 }}\n        {{- end }}\n      \
         {{- with .Values.controller.affinity }}\n      affinity:\n        {{- toYaml . | nindent 8 }}\n      {{- else }}\n      \
         affinity:\n",
    ),
    (
        "controller.yaml",
        "      terminationGracePeriodSeconds: 10\n",
        "      {{- end }}\n      terminationGracePeriodSeconds: 10\n",
    ),
    (
        "controller.yaml",
        "replicas: 2",
        "replicas: {{ .Values.controller.replicas }}",
    ),
];

/// Line ranges of the `DaemonSet` for one mode only: the first line, the line after the last one, and the replacement
/// for the other mode. The last range extends to the end of the file.
const CHOICES: [(&str, &str, &str); 3] = [
    ("            capabilities:\n", "          resources:\n", ""),
    (
        "            - name: cni-bin\n",
        "      volumes:\n",
        "            - name: kubelet-socket\n              mountPath: /tmp\n",
    ),
    (
        "        - name: cni-bin\n",
        "",
        "        - name: kubelet-socket\n          hostPath:\n            path: /tmp\n            type: Directory\n",
    ),
];

/// Arguments of `chart`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail where a template differs from what would be written
    #[arg(long)]
    check: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    for file in FILES {
        let path = templates().join(file);
        let wanted = template(file)?;
        if args.check {
            let there = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            ensure!(
                there == wanted,
                "{} differs from deploy/base: run `cargo xtask chart`",
                path.display()
            );
        } else {
            fs::write(&path, wanted).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(())
}

fn templates() -> PathBuf {
    root().join("deploy/helm/kni/templates")
}

fn template(file: &str) -> Result<String> {
    let path = root().join("deploy/base").join(file);
    let base = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut changed = CHANGES.iter().fold(base, |text, (from, to)| text.replace(from, to));
    let own = CHANGES_OF.iter().filter(|(of, _, _)| *of == file);
    for (_, from, to) in own {
        ensure!(changed.contains(from), "deploy/base/{file} has no {from:?}");
        changed = changed.replacen(from, to, 1);
    }
    let changed = if file == "daemonset.yaml" {
        with_choices(changed)?
    } else {
        changed
    };
    Ok(format!("{NOTICE}{changed}"))
}

fn with_choices(mut text: String) -> Result<String> {
    for (from, to, other) in CHOICES {
        let missing = || format!("deploy/base/daemonset.yaml has no {from:?}, or no {to:?} behind it");
        let (before, own, after) = if to.is_empty() {
            let (before, own) = text.rsplit_once(from).with_context(missing)?;
            (before, own, String::new())
        } else {
            let (before, rest) = text.split_once(from).with_context(missing)?;
            let (own, after) = rest.split_once(to).with_context(missing)?;
            (before, own, format!("{to}{after}"))
        };
        let other = if other.is_empty() {
            String::new()
        } else {
            format!("{{{{- else }}}}\n{other}")
        };
        text = format!("{before}{{{{- if eq .Values.mode \"cni\" }}}}\n{from}{own}{other}{{{{- end }}}}\n{after}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_still_finds_its_place() {
        let bases: Vec<String> = FILES
            .iter()
            .map(|file| fs::read_to_string(root().join("deploy/base").join(file)).unwrap())
            .collect();
        for (from, _) in CHANGES {
            assert!(bases.iter().any(|base| base.contains(from)), "{from:?} is nowhere");
        }
    }

    #[test]
    fn the_chart_says_what_the_base_says() {
        command(&Args { check: true }).unwrap();
    }
}
