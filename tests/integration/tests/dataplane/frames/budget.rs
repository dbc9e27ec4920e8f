//! Tests the number of instructions that the verifier processes per program, which determines the kernels that can load
//! it, and that no copy of a program is loaded before it is needed.

use anyhow::{Context as _, Error, Result, ensure};
use aya::programs::{ProgramInfo, loaded_programs};
use kni_common::IFINDEX_BASE;
use kni_integration::{model::Seen, programs::Programs, require};
use kni_model::EndpointId;

/// Maximum number of processed instructions per program. The kernel refuses a program at one million.
const BUDGET: [(&str, u32); 3] = [("from_pod", 219_000), ("to_pod", 124_000), ("xdp_pod", 5_000)];

#[test]
fn no_program_costs_the_verifier_more_than_its_budget() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("budget", 1024, |programs| {
        programs.dataplane().attach("kni3", EndpointId(3))?;
        let (mut views, problems) = programs.dataplane().programs("kni3", EndpointId(3));
        programs
            .dataplane()
            .attach_xdp("kni3", IFINDEX_BASE + 3, EndpointId(3))?;
        let xdp = programs
            .dataplane()
            .xdp_program("kni3", IFINDEX_BASE + 3, EndpointId(3));
        views.push(xdp.map_err(Error::msg)?);
        ensure!(problems.is_empty() && views.len() == BUDGET.len(), "{problems:?}");
        for (name, budget) in BUDGET {
            let view = views
                .iter()
                .find(|view| view.name == name)
                .context("an attached program")?;
            let mut loaded = loaded_programs().filter_map(Result::ok);
            let info = loaded.find(|info| info.id() == view.id).context("a loaded program")?;
            let verified = info.verified_instruction_count().context("Linux 5.16")?;
            println!("{name}: {verified} of {budget} instructions");
            ensure!(
                verified > 0 && verified <= budget,
                "{name}: {verified} instructions, more than {budget}"
            );
        }
        Ok(())
    })
}

#[test]
fn only_an_explanation_loads_the_copy_for_explanations() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("copies", 1024, |programs| {
        programs.dataplane().attach("kni3", EndpointId(3))?;
        let (views, _) = programs.dataplane().programs("kni3", EndpointId(3));
        let attached = views
            .iter()
            .find(|view| view.name == "from_pod")
            .context("from_pod")?
            .id;
        let maps = |info: &ProgramInfo| info.map_ids().ok().flatten().unwrap_or_default();
        let found = loaded_programs()
            .filter_map(Result::ok)
            .find(|info| info.id() == attached);
        let own = maps(&found.context("a loaded program")?);
        // Other tests have their own maps.
        let copies = || {
            loaded_programs()
                .filter_map(Result::ok)
                .filter(|info| info.name_as_str() == Some("from_pod"))
                .filter(|info| maps(info).iter().any(|map| own.contains(map)))
                .count()
        };
        ensure!(copies() == 1, "{} copies after the start", copies());
        // Reads the kernel's clock.
        programs.dataplane().sweep_flows()?;
        programs.dataplane().flows()?;
        ensure!(copies() == 1, "{} copies after a sweep", copies());
        programs.explain(Seen::from_pod(3), &[0; 64])?;
        ensure!(copies() == 2, "{} copies after an explanation", copies());
        Ok(())
    })
}
