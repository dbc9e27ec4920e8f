//! Tests the number of instructions that the verifier processes per program, which determines the kernels that can load
//! it.

use anyhow::{Context as _, Error, Result, ensure};
use aya::programs::loaded_programs;
use kni_common::IFINDEX_BASE;
use kni_integration::{programs::Programs, require};
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
