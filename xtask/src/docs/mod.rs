//! `docs`: checks that pages mention only existing links, files, commands and options, and that reference lists are
//! complete.

mod commands;
mod definitions;
mod facts;
mod links;
mod page;
mod reference;
mod sources;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use facts::Facts;
use page::Page;

use crate::{
    programs::{Profile, programs},
    progress::{Progress, say},
    workspace::root,
};

/// Programs that are asked for their options; the tests run them, so that they are built anyway. Those of the others
/// are in [`definitions`].
const PROGRAMS: [&str; 5] = ["kni-agent", "kni-cni", "kni-controller", "kni-node", "knictl"];

/// Arguments of `docs`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare the pages; without it, only list what the pages of reference are compared with
    #[arg(long)]
    check: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    Progress::new(1).step("pages", || {
        if args.check {
            return check();
        }
        let facts = facts()?;
        for (page, names) in facts.lists() {
            for name in names {
                say(&format!("{page}: {name}"));
            }
        }
        Ok(())
    })
}

/// Fails, with a line per finding, if a page mentions a nonexistent item, or a reference page lacks an existing one.
pub(crate) fn check() -> Result<()> {
    let facts = facts()?;
    let pages = pages()?;
    let findings = findings(&pages, &facts, &|path| root().join(path).exists());
    for finding in &findings {
        say(finding);
    }
    if !findings.is_empty() {
        bail!("{} places of the pages are not true", findings.len());
    }
    say(&format!("pages: {} files, all that they name exists", pages.len()));
    Ok(())
}

fn facts() -> Result<Facts> {
    programs(Profile::Dev, &PROGRAMS)?;
    Facts::gather(root(), &PROGRAMS.map(|name| (name, Profile::Dev.program(name))))
}

/// All findings in `pages`; `exists` checks paths relative to the root of the repository.
fn findings(pages: &[Page], facts: &Facts, exists: &dyn Fn(&Path) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for page in pages {
        found.extend(links::check(page, pages, exists));
        found.extend(commands::check(page, facts));
    }
    found.extend(reference::check(pages, facts));
    found
}

/// Every page of the repository.
fn pages() -> Result<Vec<Page>> {
    let mut files = Vec::new();
    list(root(), &mut files)?;
    files.sort();
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Page::new(path.strip_prefix(root()).unwrap_or(path), &text))
    };
    files.iter().map(read).collect()
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            list(&path, files)?;
        } else if path.extension().is_some_and(|kind| kind == "md") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let pages = [
            Page::new(Path::new(path), text),
            Page::new(Path::new("docs/b.md"), "# One two: `three`\n"),
        ];
        let exists = |path: &Path| {
            ["docs", "docs/b.md", "xtask", "xtask/src"]
                .iter()
                .any(|known| Path::new(known) == path)
        };
        findings(&pages, &Facts::example(), &exists)
            .into_iter()
            .filter(|finding| !finding.contains("has no page"))
            .collect()
    }

    #[test]
    fn a_dead_link_and_a_dead_anchor_are_found() {
        assert_eq!(
            found("docs/a.md", "[x](b.md) [y](b.md#one-two-three) [z](#here)\n## Here\n"),
            Vec::<String>::new()
        );
        assert_eq!(
            found("docs/a.md", "text\n[x](c.md)\n"),
            ["docs/a.md:2: link to `c.md`, which does not exist"]
        );
        assert_eq!(
            found("docs/a.md", "[y](b.md#one)\n"),
            ["docs/a.md:1: link to `b.md#one`, but the page has no such heading"]
        );
    }

    #[test]
    fn a_removed_flag_and_an_unknown_command_are_found() {
        for line in [
            "kni-agent --manifests a",
            "$ kni-agent stop --force=1 | less",
            "FOO=1 sudo kni-agent stop",
        ] {
            assert_eq!(
                found("a.md", &format!("```sh\n{line}\n```\n")),
                Vec::<String>::new(),
                "{line}"
            );
        }
        assert_eq!(
            found("a.md", "```sh\nkni-agent --manifests a \\\n  --removed\n```\n"),
            ["a.md:2: `kni-agent` has no option `--removed`"]
        );
        assert_eq!(
            found("a.md", "Use `kni-agent halt`.\n"),
            ["a.md:1: `kni-agent` has no command `halt`"]
        );
        assert_eq!(found("a.md", "Use `kni-agent stop --manifests`.\n").len(), 1);
        assert_eq!(
            found("a.md", "Use `--removed`.\n"),
            ["a.md:1: no program has the option `--removed`"]
        );
        assert_eq!(found("a.md", "Use `--manifests`.\n"), Vec::<String>::new());
    }

    #[test]
    fn a_missing_file_is_found() {
        assert_eq!(
            found("a.md", "See `xtask/src` and `xtask/src/`.\n"),
            Vec::<String>::new()
        );
        assert_eq!(
            found("a.md", "See `xtask/lib.rs`.\n"),
            ["a.md:1: `xtask/lib.rs` does not exist"]
        );
        assert_eq!(
            found("a.md", "See `1/2` and `kni.dev/network`.\n"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn an_undocumented_drop_reason_is_found() {
        let page = "docs/reference/drop-reasons.md";
        let whole = "| reason | code |\n|---|---|\n| `no_route` | 25 |\n";
        assert_eq!(found(page, whole), Vec::<String>::new());
        assert_eq!(
            found(page, "| reason | code |\n|---|---|\n"),
            ["docs/reference/drop-reasons.md:1: does not list `no_route` 25"]
        );
        assert_eq!(
            found(page, &format!("{whole}| `gone` | 9 |\n")),
            ["docs/reference/drop-reasons.md:4: lists `gone` 9, which does not exist"]
        );
    }
}
