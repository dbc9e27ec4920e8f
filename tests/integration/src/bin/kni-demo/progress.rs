//! Prints the demo's progress.

/// Begins a part of the demo.
pub(crate) fn part(title: &str) {
    println!("\n==> {title}");
}

/// Prints text line by line below the part's heading.
pub(crate) fn print_line(text: impl std::fmt::Display) {
    for line in text.to_string().trim_end().lines() {
        println!("    {line}");
    }
}
