//! Reports what the verifier of this kernel counts for each program.

use anyhow::{Context as _, Result, bail};
use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{Program, ProgramError},
};
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};

/// The constant that makes a copy of the programs one that explains packets, and its value.
const DRY_RUN: &str = "DRY_RUN";
static YES: u8 = 1;
/// The constant of the node's network namespace: with 0 the programs of sockets would do nothing.
const NODE_NAMESPACE: &str = "NODE_NAMESPACE";
static A_NAMESPACE: u64 = 1;
/// The programs that have such a copy.
const EXPLAINING: [&str; 2] = ["from_pod", "to_pod"];

/// Prints a line `verified PROGRAM: N instructions, stack A+B` for each program; fails if one is refused.
pub fn report(object: &[u8]) -> Result<()> {
    let mut loader = EbpfLoader::new();
    loader.verifier_log_level(VerifierLogLevel::STATS);
    loader.override_global(NODE_NAMESPACE, &A_NAMESPACE, true);
    let mut ebpf = loader.load(object)?;
    let mut names: Vec<String> = ebpf.programs().map(|(name, _)| name.to_owned()).collect();
    names.sort();
    for name in names {
        verify(&mut ebpf, &name, &name)?;
    }
    drop(ebpf);
    loader.override_global(DRY_RUN, &YES, true);
    let mut ebpf = loader.load(object)?;
    for name in EXPLAINING {
        verify(&mut ebpf, name, &format!("{name} (dry run)"))?;
    }
    Ok(())
}

fn verify(ebpf: &mut Ebpf, name: &str, shown: &str) -> Result<()> {
    let program = ebpf.program_mut(name).context("a program of the object")?;
    let log = statistics(program).with_context(|| format!("{shown} is refused"))?;
    let (instructions, stack) = parse(&log).with_context(|| format!("{shown}: no statistics in {log:?}"))?;
    println!("verified {shown}: {instructions} instructions, stack {stack}");
    Ok(())
}

/// The log of a load that the verifier accepts.
///
/// aya hands out a log only with an error. The kernel makes the descriptor of a program after it has verified and
/// compiled it, so with no descriptor left the load fails then, and only then, for that reason.
fn statistics(program: &mut Program) -> Result<String> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard)?;
    let loaded = load(program);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    match loaded {
        Err(ProgramError::LoadError { io_error, verifier_log })
            if io_error.raw_os_error() == Some(Errno::EMFILE as i32) =>
        {
            Ok(verifier_log.to_string())
        }
        Err(error) => Err(error.into()),
        Ok(()) => bail!("it was loaded without a descriptor"),
    }
}

fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::SchedClassifier(program) => program.load(),
        Program::Xdp(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}

/// The number in `processed N insns`, and the stack of the program and of each of its functions as `A+B+C`: in a line
/// `stack depth A+B+C`, or on newer kernels in a line `subprog ... stack A` for each. Those also print the stack of the
/// deepest chain of calls, which follows as ` (N)`.
fn parse(log: &str) -> Option<(u64, String)> {
    let words_after = |start: &str| log.lines().find_map(|line| line.strip_prefix(start));
    let instructions = words_after("processed ")?.split(' ').next()?.parse().ok()?;
    let depth = words_after("stack depth ")?.trim_end();
    let Some(deepest) = depth.strip_prefix("max ") else {
        let known = depth.split('+').all(|part| part.parse::<u32>().is_ok());
        return known.then(|| (instructions, depth.to_owned()));
    };
    let deepest: u32 = deepest.split(' ').next()?.parse().ok()?;
    let functions = log.lines().filter(|line| line.starts_with("subprog "));
    let parts: Option<Vec<&str>> = functions
        .map(|line| {
            let (_, stack) = line.rsplit_once(" stack ")?;
            let part = stack.split(' ').next()?;
            part.parse::<u32>().ok().map(|_| part)
        })
        .collect();
    let parts = parts.filter(|parts| !parts.is_empty())?;
    Some((instructions, format!("{} ({deepest})", parts.join("+"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_numbers_are_found() {
        let log = "verification time 813 usec\nstack depth 400+16+0\n\
                   processed 1234 insns (limit 1000000) max_states_per_insn 4 total_states 81 peak_states 81 mark_read 1\n";
        assert_eq!(parse(log), Some((1234, "400+16+0".to_owned())));
        let log = "verification time 813 usec\nstack depth max 480\n\
                   subprog 0 (from_pod) main insns_self 25835 insns_total 39196 stack 200\n\
                   subprog 1 (error) static insns_self 1077 insns_total 1077 stack 232\n\
                   processed 1234 insns (limit 1000000) max_states_per_insn 4\n";
        assert_eq!(parse(log), Some((1234, "200+232 (480)".to_owned())));
        assert_eq!(parse("processed 1234 insns"), None);
        assert_eq!(parse("stack depth other 3\nprocessed 1234 insns"), None);
    }
}
