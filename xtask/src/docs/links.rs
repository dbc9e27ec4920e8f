//! Checks that the targets of links and the file paths in inline code exist.

use std::path::{Component, Path, PathBuf};

use super::page::Page;

/// Folders of build output.
const BUILT: &str = "target";

/// The dead links of `page`, and the files that it mentions but that do not exist.
pub(super) fn check(page: &Page, pages: &[Page], exists: &dyn Fn(&Path) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for line in page.prose() {
        for target in targets(&line.text) {
            found.extend(refuse(page, target, pages, exists).map(|why| page.at(line.number, &why)));
        }
    }
    for (number, code) in page.inline_code() {
        if let Some(path) = repository_path(code, exists)
            && !exists(&path)
        {
            found.push(page.at(number, &format!("`{code}` does not exist")));
        }
    }
    found
}

/// The targets of `[text](target)`, `src="target"` and `href="target"`, outside of inline code.
fn targets(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (open, close) in [("](", ')'), ("src=\"", '"'), ("href=\"", '"')] {
        for rest in line.split(open).skip(1) {
            found.extend(rest.split([close, ' ']).next());
        }
    }
    found
}

fn refuse(page: &Page, target: &str, pages: &[Page], exists: &dyn Fn(&Path) -> bool) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() {
        page.path.clone()
    } else {
        normal(&page.path.parent().unwrap_or(Path::new("")).join(file))
    };
    let other = pages.iter().find(|page| page.path == path);
    if other.is_none() && !exists(&path) {
        return Some(format!("link to `{target}`, which does not exist"));
    }
    let is_heading = |other: &Page| other.anchors().iter().any(|known| known == anchor);
    match other {
        Some(other) if !anchor.is_empty() && !is_heading(other) => {
            Some(format!("link to `{target}`, but the page has no such heading"))
        }
        _ => None,
    }
}

/// The path without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => normal.push(component),
        }
    }
    normal
}

/// The path in a piece of inline code, if it is below a folder of the repository.
fn repository_path(code: &str, exists: &dyn Fn(&Path) -> bool) -> Option<PathBuf> {
    let is_path = |char: char| char.is_ascii_alphanumeric() || "._/-".contains(char);
    let code = code.split(':').next().unwrap_or_default().trim_end_matches('/');
    let (first, rest) = code.split_once('/')?;
    let is_one = !first.is_empty() && !rest.is_empty() && code.chars().all(is_path);
    let is_ours = first != BUILT && !first.starts_with('.') && exists(Path::new(first));
    (is_one && is_ours).then(|| PathBuf::from(code))
}
