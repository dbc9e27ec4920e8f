//! Tests the kubelet's settings of KNI: where they may come from, and which are refused by name.

use std::{fs, path::Path, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{machine, require};
use tempfile::TempDir;

/// Refused settings, each with a part of the message.
const REFUSED: [(&str, &str); 6] = [
    (
        "networkRuntimeEndpoint: unix:///run/x.sock",
        "networkRuntimeEndpoint requires the feature gate KNI",
    ),
    (
        "featureGates: {KNI: true}\nnetworkRuntimeEndpoint: relative.sock",
        "networkRuntimeEndpoint \"relative.sock\"",
    ),
    (
        "featureGates: {KNI: true}\nnetworkRuntimeEndpoint: tcp://127.0.0.1:1",
        "networkRuntimeEndpoint \"tcp://127.0.0.1:1\"",
    ),
    (
        "featureGates: {KNI: true}\nnetworkRuntimeEndpoint: unix:///run/../x.sock",
        "networkRuntimeEndpoint \"unix:///run/../x.sock\"",
    ),
    (
        "featureGates: {KNI: true}\nnetworkRuntimeGracePeriod: -1s",
        "networkRuntimeGracePeriod -1s is negative",
    ),
    (
        "networkRuntimeGracePeriod: 1s",
        "networkRuntimeGracePeriod requires the feature gate KNI",
    ),
];

#[test]
fn settings_are_checked_and_arrive() -> Result<()> {
    require!(machine);
    let kubelet = machine::kni()?.programs.path("kubelet");
    let folder = tempfile::tempdir()?;
    for (settings, why) in REFUSED {
        let said = start(&kubelet, &folder, settings, None, &[])?;
        ensure!(said.contains(why), "{settings}:\n{said}");
    }
    let long = format!(
        "featureGates: {{KNI: true}}\nnetworkRuntimeEndpoint: unix:///{}",
        "x".repeat(108)
    );
    let said = start(&kubelet, &folder, &long, None, &[])?;
    ensure!(
        said.contains("networkRuntimeEndpoint has a path of 109 bytes"),
        "{said}"
    );
    // A file, a drop-in folder over it, and a flag over both: what arrives is refused, so that it is named.
    let gate = "featureGates: {KNI: true}\nnetworkRuntimeEndpoint: from-file";
    let said = start(&kubelet, &folder, gate, None, &[])?;
    ensure!(said.contains("\"from-file\""), "{said}");
    let drop_in = "networkRuntimeEndpoint: from-drop-in";
    let said = start(&kubelet, &folder, gate, Some(drop_in), &[])?;
    ensure!(said.contains("\"from-drop-in\""), "{said}");
    let said = start(
        &kubelet,
        &folder,
        gate,
        Some(drop_in),
        &["--network-runtime-endpoint=from-flag"],
    )?;
    ensure!(said.contains("\"from-flag\""), "{said}");
    Ok(())
}

/// The messages of a kubelet that does not start.
fn start(kubelet: &Path, folder: &TempDir, settings: &str, drop_in: Option<&str>, flags: &[&str]) -> Result<String> {
    let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
    let file = folder.path().join("kubelet.yaml");
    fs::write(&file, format!("{head}{settings}\n"))?;
    let mut command = std::process::Command::new(kubelet);
    command.arg(format!("--config={}", file.display())).args(flags);
    if let Some(settings) = drop_in {
        let folder = folder.path().join("kubelet.conf.d");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("10-kni.conf"), format!("{head}{settings}\n"))?;
        command.arg(format!("--config-dir={}", folder.display()));
    }
    let done = command.stdin(Stdio::null()).output().context("run the kubelet")?;
    ensure!(!done.status.success(), "it has started with {settings}");
    // Its log quotes what is quoted in the error.
    Ok(String::from_utf8_lossy(&done.stderr).replace("\\\"", "\""))
}
