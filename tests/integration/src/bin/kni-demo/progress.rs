//! Prints the progress of the demo.

/// Prints the heading of a part.
pub(crate) fn part(title: &str) {
    println!("\n==> {title}");
}

/// Prints text line by line below the heading of the part.
pub(crate) fn print_line(text: impl std::fmt::Display) {
    for line in text.to_string().trim_end().lines() {
        println!("    {line}");
    }
}
