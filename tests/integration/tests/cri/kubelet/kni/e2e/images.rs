//! Writes the images of upstream's end-to-end tests, around programs of its modules and files of Debian's packages.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use kni_local_node::{
    Programs, image,
    oci::{Entry, Image},
};
use rcgen::{CertificateParams, KeyPair};

use super::super::super::scene::Scene;

/// The usual tools in one file.
const BUSYBOX: &str = "/bin/busybox";
/// Programs of packages that the tests execute in pods, by their names there. The shell of Busybox would execute its
/// own instead, and those of it that resolve names do not run beside the libraries of the others.
const TOOLS: [(&str, &str); 9] = [
    ("bash", "/bin/bash"),
    ("curl", "/usr/bin/curl"),
    ("dig", "/usr/bin/dig"),
    ("getent", "/usr/bin/getent"),
    ("nc", "/bin/nc.openbsd"),
    ("nslookup", "/usr/bin/nslookup"),
    ("sh", "/bin/dash"),
    ("ss", "/bin/ss"),
    ("wget", "/usr/bin/wget"),
];
const FOLDERS: [&str; 12] = [
    "bin", "dev", "etc", "home", "proc", "root", "run", "sys", "uploads", "usr", "usr/bin", "var",
];
const TEXTS: [(&str, &str); 3] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    ),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("etc/nsswitch.conf", "hosts: files dns\n"),
];

/// An image by the last part of its name.
struct Made {
    name: &'static str,
    /// Built programs, of which the first one is the entry point.
    programs: &'static [&'static str],
    arguments: &'static [&'static str],
}

/// The images that can be made.
const MADE: [Made; 4] = [
    Made {
        name: "agnhost",
        programs: &["agnhost", "coredns"],
        arguments: &["pause"],
    },
    Made {
        name: "busybox",
        programs: &[],
        arguments: &["sh"],
    },
    Made {
        name: "glibc-dns-testing",
        programs: &[],
        arguments: &["bash"],
    },
    Made {
        name: "regression-issue-74839",
        programs: &["regression-issue-74839"],
        arguments: &[],
    },
];
/// The image of the container that holds a pod's namespaces, which the node has under another name.
const PAUSE: &str = "pause";

/// Imports the images that can be made, under the names that the tests expect. Returns the names of the others.
pub(super) fn import(scene: &Scene, programs: &Programs, scratch: &Path) -> Result<Vec<String>> {
    let mut expected = expected(programs)?;
    let root = root()?;
    for made in &MADE {
        let reference = newest(&expected, made.name).with_context(|| format!("the tests use no {}", made.name))?;
        let archive = scratch.join(format!("{}.tar", made.name));
        made.image(&root, programs)?.write(&archive, &reference)?;
        scene
            .local()
            .import_archive(&archive)
            .with_context(|| reference.clone())?;
        fs::remove_file(&archive)?;
        expected.remove(&reference);
    }
    let pause = newest(&expected, PAUSE).context("the tests use no pause")?;
    scene.local().ctr(&["images", "tag", image::PAUSE, &pause])?;
    expected.remove(&pause);
    Ok(expected.into_iter().collect())
}

impl Made {
    fn image(&self, root: &BTreeMap<String, Entry>, programs: &Programs) -> Result<Image> {
        let mut entries = root.clone();
        for name in self.programs {
            entries.insert((*name).into(), program(&programs.path(name))?);
        }
        Ok(Image {
            entries,
            entrypoint: self.programs.iter().take(1).map(|name| format!("/{name}")).collect(),
            arguments: self.arguments.iter().map(|word| (*word).to_owned()).collect(),
            environment: vec!["PATH=/bin:/usr/bin".into()],
            labels: BTreeMap::new(),
        })
    }
}

/// Every image name of the tests.
fn expected(programs: &Programs) -> Result<BTreeSet<String>> {
    let mut tests = Command::new(programs.path("e2e.test"));
    let done = tests.arg("--list-images").output().context("run e2e.test")?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let listed = String::from_utf8(done.stdout).context("a list of images")?;
    Ok(listed.lines().map(|line| line.trim().to_owned()).collect())
}

/// The name with the newest tag of an image: the tests also name older ones of some.
fn newest(names: &BTreeSet<String>, image: &str) -> Option<String> {
    let version = |name: &&String| -> Option<Vec<u32>> {
        let (before, tag) = name.rsplit_once(':')?;
        let numbers = tag.trim_start_matches('v').split(['.', '-']);
        (before.rsplit('/').next()? == image).then(|| numbers.filter_map(|number| number.parse().ok()).collect())
    };
    let versions = names.iter().filter_map(|name| Some((version(&name)?, name)));
    versions.max().map(|(_, name)| name.clone())
}

/// What all images have: the shell, tools and their libraries.
fn root() -> Result<BTreeMap<String, Entry>> {
    let mut root: BTreeMap<String, Entry> = FOLDERS.map(|name| (name.to_owned(), Entry::Folder(0o755))).into();
    root.insert("tmp".into(), Entry::Folder(0o1777));
    for (name, text) in TEXTS {
        root.insert(name.into(), Entry::Program(text.into()));
    }
    // A server of agnhost looks for these names.
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["localhost".to_owned()])?.self_signed(&key)?;
    root.insert("localhost.crt".into(), Entry::Program(certificate.pem().into()));
    root.insert("localhost.key".into(), Entry::Program(key.serialize_pem().into()));
    root.insert("bin/busybox".into(), program(Path::new(BUSYBOX))?);
    let applets = output(Command::new(BUSYBOX).arg("--list"))?;
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        root.insert(format!("bin/{applet}"), Entry::Link("busybox".into()));
    }
    for (name, file) in TOOLS {
        root.insert(format!("bin/{name}"), program(Path::new(file))?);
        for library in libraries(file)? {
            add(&mut root, &library)?;
        }
    }
    Ok(root)
}

/// The libraries of a program, and its linker.
fn libraries(file: &str) -> Result<Vec<PathBuf>> {
    let listed = output(Command::new("ldd").arg(file))?;
    // `NAME => PATH (ADDRESS)`, of the linker `PATH (ADDRESS)`.
    let paths = listed.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}

fn add(root: &mut BTreeMap<String, Entry>, file: &Path) -> Result<()> {
    let inside = file.strip_prefix("/")?;
    for folder in inside
        .ancestors()
        .skip(1)
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        let name = folder.display().to_string();
        root.entry(name).or_insert(Entry::Folder(0o755));
    }
    root.insert(inside.display().to_string(), program(file)?);
    Ok(())
}

fn program(file: &Path) -> Result<Entry> {
    let bytes = fs::read(file).with_context(|| format!("read {}; `cargo xtask setup` installs it", file.display()))?;
    Ok(Entry::Program(bytes))
}

fn output(command: &mut Command) -> Result<String> {
    let done = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(
        done.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    String::from_utf8(done.stdout).context("not UTF-8")
}
