//! Says what is going on.

/// Begins a part of the demo.
pub(crate) fn part(title: &str) {
    println!("\n==> {title}");
}

/// Tells something, line by line, below the part.
pub(crate) fn tell(text: impl std::fmt::Display) {
    for line in text.to_string().trim_end().lines() {
        println!("    {line}");
    }
}
