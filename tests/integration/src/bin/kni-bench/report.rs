//! Prints headings and tables, and describes the machine.

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use crate::{Effort, cpu, cpu::Cpus};

/// The heading of a table.
pub(crate) fn heading(text: &str) {
    println!("\n{text}");
}

/// Prints a table: names on the left, numbers on the right.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
}

/// Describes the machine, the CPUs and the duration of the measurement.
pub(crate) fn machine(cpus: &Cpus, effort: Effort, json: &mut Map<String, Value>) -> Result<()> {
    let (kernel, model) = (cpu::kernel()?, cpu::model());
    println!("Linux {kernel}, {model}");
    let two = cpus.other.map_or_else(
        || "this machine has no second one".to_owned(),
        |other| format!("\"2 CPUs\": sender on CPU {other}, receiver on CPU {}", cpus.one),
    );
    println!("pinned: client and server both on CPU {}; {two}", cpus.one);
    println!("{} interleaved rounds of {:?} each", effort.rounds, effort.each);
    json.insert(
        "machine".into(),
        json!({
            "kernel": kernel,
            "cpu": model,
            "pinned_to_cpu": cpus.one,
            "second_cpu": cpus.other,
            "rounds": effort.rounds,
            "seconds": effort.each.as_secs_f64(),
        }),
    );
    Ok(())
}
