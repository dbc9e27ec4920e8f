//! Creates and enters network and mount namespaces, and runs commands inside.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io::Write as _,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns, unshare};

/// With its folder: with a `PATH` of its own, the standard library would search any other name after a fork.
const NSENTER: &str = "/usr/bin/nsenter";
/// How long to wait for what a worker of the kernel does.
const PATIENCE: Duration = Duration::from_mins(1);

/// A network namespace and optionally a mount namespace. The handle keeps both alive; clones share it.
#[derive(Debug, Clone)]
pub struct Namespaces {
    name: Arc<str>,
    net: Arc<File>,
    mnt: Option<Arc<File>>,
}

impl Namespaces {
    /// The namespaces of the calling thread, for processes of the machine itself.
    pub fn current(name: &str) -> Result<Self> {
        let net = Arc::new(File::open("/proc/thread-self/ns/net").context("own network namespace")?);
        Ok(Self {
            name: name.into(),
            net,
            mnt: None,
        })
    }

    /// A fresh network namespace with `lo` up, and the mounts of the machine.
    pub fn fresh_net(name: &str) -> Result<Self> {
        let ns = Self::make(name, CloneFlags::CLONE_NEWNET, || Ok(()))?;
        ns.ip(&["link set lo up"])?;
        Ok(ns)
    }

    /// Fresh network and mount namespaces. `prepare` runs inside before they are visible to others.
    pub fn fresh(name: &str, prepare: impl FnOnce() -> Result<()> + Send) -> Result<Self> {
        Self::make(name, CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS, prepare)
    }

    fn make(name: &str, flags: CloneFlags, prepare: impl FnOnce() -> Result<()> + Send) -> Result<Self> {
        on_thread(name, || {
            unshare(flags).with_context(|| format!("namespaces for {name}"))?;
            prepare()?;
            let net = Arc::new(File::open("/proc/thread-self/ns/net")?);
            let mnt = flags
                .contains(CloneFlags::CLONE_NEWNS)
                .then(|| File::open("/proc/thread-self/ns/mnt"));
            Ok(Self {
                name: name.into(),
                net,
                mnt: mnt.transpose()?.map(Arc::new),
            })
        })?
    }

    /// The network namespace at `path`, as this mount namespace sees it, with the same mounts.
    ///
    /// The handle keeps the namespace alive after its path was unmounted, as a pod's sandbox process does.
    pub fn net_at(&self, name: &str, path: &Path) -> Result<Self> {
        let net = self
            .enter(|| File::open(path))?
            .with_context(|| format!("network namespace {}", path.display()))?;
        Ok(Self {
            name: name.into(),
            net: Arc::new(net),
            mnt: self.mnt.clone(),
        })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path by which other processes can open the network namespace while this handle lives.
    pub fn net_path(&self) -> PathBuf {
        descriptor_path(&self.net)
    }

    /// Runs `f` inside on a thread of its own and returns its result; a panic is resumed in the caller.
    ///
    /// Sockets opened inside stay inside, whatever thread uses them. Inside, look at `/proc/thread-self`, not at
    /// `/proc/self`: the latter (and `/proc/net`, `/proc/mounts`) shows the namespaces of the process's first thread.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> Result<R> {
        on_thread(&self.name, || {
            self.join().with_context(|| format!("enter {}", self.name))?;
            Ok(f())
        })?
    }

    fn join(&self) -> nix::Result<()> {
        if let Some(mnt) = &self.mnt {
            // The kernel refuses to change the mount namespace of a task that shares its root and current folder.
            unshare(CloneFlags::CLONE_FS)?;
            setns(mnt, CloneFlags::CLONE_NEWNS)?;
        }
        setns(&self.net, CloneFlags::CLONE_NEWNET)
    }

    /// A command that runs inside. Its program is searched in the inner `PATH`, which includes the sbin folders. This
    /// handle, or a clone of it, must live until the program has started.
    ///
    /// `nsenter` enters, not a closure between fork and exec: with such a closure the standard library copies the page
    /// tables of this process, which takes milliseconds in a process of a hundred megabytes.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(NSENTER);
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin"));
        command.arg(format!("--net={}", self.net_path().display()));
        if let Some(mnt) = &self.mnt {
            command.arg(format!("--mount={}", descriptor_path(mnt).display()));
        }
        command.arg("--").arg(program);
        command
    }

    /// Runs a command to its end and returns its stdout; failure quotes its stderr.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        self.run_with_input(program, args, "")
    }

    /// [`Self::run`] with the given stdin.
    pub fn run_with_input(&self, program: &str, args: &[&str], input: &str) -> Result<String> {
        let what = || format!("{program} {} in {}", args.join(" "), self.name);
        let mut command = self.command(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().with_context(what)?;
        child
            .stdin
            .take()
            .context("no stdin")?
            .write_all(input.as_bytes())
            .with_context(what)?;
        let out = child.wait_with_output().with_context(what)?;
        let stderr = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "{}: {}: {}", what(), out.status, stderr.trim());
        String::from_utf8(out.stdout).with_context(what)
    }

    /// Runs `ip` commands in one process, in order; stops at the first failure. Options such as `-6` cannot be given.
    pub fn ip(&self, commands: &[&str]) -> Result<()> {
        let mut batch = String::new();
        for command in commands {
            writeln!(batch, "{command}")?;
        }
        self.run_with_input("ip", &["-batch", "-"], &batch).map(drop)
    }

    /// Replaces the nftables rules that `script` names; see nft(8) for its language.
    pub fn nft(&self, script: &str) -> Result<()> {
        self.run_with_input("nft", &["-f", "-"], script).map(drop)
    }

    /// Connects a veth pair: `here` in this namespace, `there` in `other`; both up and ready to send.
    pub fn veth(&self, here: &str, other: &Self, there: &str) -> Result<()> {
        let peer = other.net_path();
        self.ip(&[&format!(
            "link add {here} type veth peer name {there} netns {}",
            peer.display()
        )])?;
        let ends = [(self, here), (other, there)];
        for (ns, link) in ends {
            // With duplicate address detection, link-local addresses and their routes appear up to two seconds later.
            ns.accept_dad(link, false)?;
            ns.ip(&[&format!("link set {link} up")])?;
        }
        for (ns, link) in ends {
            ns.wait_operational(link)?;
            ns.wait_for_local(link, "fe80")?;
            ns.accept_dad(link, true)?;
        }
        Ok(())
    }

    /// Gives `link` an address (`address/prefix`) that can be used when this returns.
    pub fn add_address(&self, link: &str, address: &str) -> Result<()> {
        let (ip, _) = address.split_once('/').context("no prefix length")?;
        if !ip.contains(':') {
            return self.ip(&[&format!("address add {address} dev {link}")]);
        }
        self.ip(&[&format!("address add {address} dev {link} nodad")])?;
        // Even without duplicate address detection, a worker of the kernel adds the local route later, when it gets the
        // rtnl lock; packets to the address are lost until then.
        self.wait_for_local(link, &format!("{ip} "))
    }

    /// Waits until an IPv6 address of `link` with this prefix of its text can be used.
    pub fn wait_for_local(&self, link: &str, address: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !self
            .run("ip", &["-6", "route", "show", "table", "local", "dev", link])?
            .contains(&format!("local {address}"))
        {
            ensure!(
                Instant::now() < deadline,
                "waited {PATIENCE:?} in vain until {address} on {link} of {} can be used",
                self.name
            );
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Sets whether packets of both families are forwarded between links.
    pub fn set_forwarding(&self, forward: bool) -> Result<()> {
        for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            let file = format!("/proc/sys/net/{name}");
            self.enter(|| fs::write(&file, if forward { "1" } else { "0" }))?
                .with_context(|| format!("write {file}"))?;
        }
        Ok(())
    }

    /// Sets whether addresses of `link` are checked for duplicates.
    fn accept_dad(&self, link: &str, accept: bool) -> Result<()> {
        let file = format!("/proc/sys/net/ipv6/conf/{link}/accept_dad");
        let value = if accept { "1" } else { "0" };
        self.enter(|| fs::write(&file, value))?
            .with_context(|| format!("write {file}"))
    }

    /// The end that came up first drops packets until a worker of the kernel has noticed the other end.
    fn wait_operational(&self, link: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !self
            .run("ip", &["-o", "link", "show", "dev", link])?
            .contains("state UP")
        {
            ensure!(
                Instant::now() < deadline,
                "waited {PATIENCE:?} in vain until {link} in {} is up",
                self.name
            );
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// A path by which other processes can open a file that this process has open.
fn descriptor_path(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// The words of a command that runs inside, without those that only enter.
pub(crate) fn shown(command: &Command) -> String {
    let words = || std::iter::once(command.get_program()).chain(command.get_args());
    let enters = words().position(|word| word == "--").map_or(0, |last| last + 1);
    let inside: Vec<_> = words().skip(enters).map(|word| word.to_string_lossy()).collect();
    inside.join(" ")
}

fn on_thread<R: Send>(name: &str, f: impl FnOnce() -> R + Send) -> Result<R> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name(name.into());
        let handle = builder.spawn_scoped(scope, f).map_err(|e| anyhow!(e))?;
        Ok(handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
