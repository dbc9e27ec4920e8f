//! Follows the modules of a crate from its root file, and resolves paths to files.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{
    declarations,
    paths::{self, Found},
    tokens::{self, Kind, Token},
};

/// Maximum number of re-exports that are followed.
const MAX_HOPS: usize = 8;

/// A module with a file of its own.
#[derive(Debug)]
pub(super) struct Module {
    /// Its file.
    pub(super) file: PathBuf,
    /// The paths in it, without those of its tests.
    pub(super) paths: Vec<Found>,
    /// The name under which each `use` in it can be reached from elsewhere, and the path behind it; `*` for a glob.
    imports: Vec<(String, Vec<String>)>,
    /// The names that it declares itself.
    declared: Vec<String>,
}

/// The modules of one crate by their names from the root, which is empty.
#[derive(Debug)]
pub(super) struct Modules {
    /// All of them, without those that are for tests only.
    pub(super) all: BTreeMap<Vec<String>, Module>,
    /// The name of the crate's library as its programs see it.
    library: String,
}

impl Modules {
    /// Reads the crate whose root is `file`; `library` is the name of the package's library.
    pub(super) fn read(file: &Path, library: &str) -> Result<Self> {
        let mut modules = Self {
            all: BTreeMap::new(),
            library: library.replace('-', "_"),
        };
        let folder = file.parent().unwrap_or(Path::new(""));
        modules.add(file, &[], folder)?;
        Ok(modules)
    }

    fn add(&mut self, file: &Path, names: &[String], folder: &Path) -> Result<()> {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let tokens = tokens::cut(&text).with_context(|| file.display().to_string())?;
        let (children, module) = Module::new(file, &tokens);
        self.all.insert(names.to_vec(), module);
        for child in children {
            let candidates = [folder.join(format!("{child}.rs")), folder.join(&child).join("mod.rs")];
            // A file that another attribute names is not followed.
            let Some(file) = candidates.iter().find(|file| file.is_file()) else {
                continue;
            };
            let mut names = names.to_vec();
            names.push(child.clone());
            self.add(file, &names, &folder.join(&child))?;
        }
        Ok(())
    }

    /// The module that the path `found` in the module `from` resolves to; `None` outside of the crate.
    pub(super) fn target(&self, from: &[String], found: &Found) -> Option<Vec<String>> {
        self.absolute(from, &found.names, found.inline_depth)
            .map(|names| self.walk(&names, 0))
    }

    /// A path counted from the crate's root.
    fn absolute(&self, from: &[String], names: &[String], inline_depth: usize) -> Option<Vec<String>> {
        let (first, rest) = names.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" | "super" => {
                let relative = if first == "self" { rest } else { names };
                let ups = relative.iter().take_while(|name| *name == "super").count();
                let kept = from.len().checked_sub(ups.saturating_sub(inline_depth))?;
                let base = from.get(..kept)?;
                Some([base, relative.get(ups..)?].concat())
            }
            // Another root of the package, or an external crate.
            name if name == self.library => None,
            _ => {
                let own = [from, names].concat();
                let child = own.get(..=from.len())?;
                self.all.contains_key(child).then_some(own)
            }
        }
    }

    /// Resolves `names` as far as they are modules; follows imported names to their origin.
    fn walk(&self, names: &[String], hops: usize) -> Vec<String> {
        let mut here: Vec<String> = Vec::new();
        for (index, name) in names.iter().enumerate() {
            let mut next = here.clone();
            next.push(name.clone());
            if self.all.contains_key(&next) {
                here = next;
                continue;
            }
            let behind = names.get(index + 1..).unwrap_or_default();
            return match self.import(&here, name, hops) {
                Some(origin) => self.walk(&[origin.as_slice(), behind].concat(), hops + 1),
                None => here,
            };
        }
        here
    }

    /// The origin of a name that `module` imports, counted from the root.
    fn import(&self, module: &[String], name: &str, hops: usize) -> Option<Vec<String>> {
        let here = self.all.get(module)?;
        if hops >= MAX_HOPS || here.declared.iter().any(|declared| declared == name) {
            return None;
        }
        let named = here.imports.iter().find(|(imported, _)| imported == name);
        if let Some((_, path)) = named {
            return self
                .absolute(module, path, 0)
                .filter(|path| path.as_slice() != [module, &[name.to_owned()]].concat());
        }
        let globs = here.imports.iter().filter(|(imported, _)| imported == "*");
        globs
            .filter_map(|(_, path)| self.absolute(module, path, 0))
            .map(|path| self.walk(&path, hops + 1))
            .filter(|origin| origin.as_slice() != module)
            .find(|origin| {
                let declares = |module: &Module| module.declared.iter().any(|declared| declared == name);
                self.all.get(origin).is_some_and(declares)
            })
            .map(|origin| [origin, vec![name.to_owned()]].concat())
    }
}

impl Module {
    /// The modules that a file declares in separate files, and the module of the file.
    fn new(file: &Path, tokens: &[Token]) -> (Vec<String>, Self) {
        // Inline modules are test modules.
        let paths: Vec<Found> = paths::find(tokens)
            .into_iter()
            .filter(|found| found.inline_depth == 0)
            .collect();
        let imports = paths
            .iter()
            .filter(|found| found.is_import)
            .filter_map(|found| {
                let (last, before) = found.names.split_last()?;
                let path = if last == "*" || last == "self" {
                    before
                } else {
                    &found.names
                };
                let name = found.alias.clone().unwrap_or_else(|| match last.as_str() {
                    "self" => before.last().cloned().unwrap_or_default(),
                    other => other.to_owned(),
                });
                Some((name, path.to_vec()))
            })
            .collect();
        let declared = declarations::find(tokens);
        let module = Self {
            file: file.to_owned(),
            paths,
            imports,
            declared: declared.into_iter().map(|declared| declared.name).collect(),
        };
        (children(tokens), module)
    }
}

/// The names of `mod name;`, without those behind `#[cfg(test)]`.
fn children(tokens: &[Token]) -> Vec<String> {
    let word = |position: usize| match &tokens.get(position)?.kind {
        Kind::Word(word) => Some(word.as_str()),
        Kind::PathSep | Kind::Mark(_) | Kind::Literal => None,
    };
    let is_mark =
        |position: usize, mark: char| tokens.get(position).is_some_and(|token| token.kind == Kind::Mark(mark));
    let mut is_test = false;
    let mut found = Vec::new();
    for position in 0..tokens.len() {
        if word(position) == Some("cfg") && word(position + 2) == Some("test") && is_mark(position + 1, '(') {
            is_test = true;
        } else if is_mark(position, ';') || is_mark(position, '{') {
            is_test = false;
        } else if word(position) == Some("mod") && is_mark(position + 2, ';') && !is_test {
            found.extend(word(position + 1).map(str::to_owned));
        }
    }
    found
}
