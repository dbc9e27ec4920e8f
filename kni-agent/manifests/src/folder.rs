//! Reads the files of a folder.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::{ManifestError, ManifestSet, Refusal, read::read_file, set::combine};

/// Largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The content of a folder, in the order of file names: each text, or the reason why it cannot be read.
pub(super) type Texts = Vec<(PathBuf, Result<String, String>)>;

/// Reads every manifest of a folder.
pub(super) fn read(dir: &Path) -> Result<Texts, ManifestError> {
    let names = list(dir).map_err(|source| ManifestError::Folder {
        path: dir.to_path_buf(),
        source,
    })?;
    let files = names.into_iter().map(|name| dir.join(name));
    Ok(files
        .map(|path| {
            let text = read_text(&path);
            (path, text)
        })
        .collect())
}

/// Parses the texts. Refused policies stay as they are in `former`. Takes about 50 us for each object.
pub(super) fn parse(texts: &Texts, former: Option<&ManifestSet>) -> ManifestSet {
    let read = texts.iter().flat_map(|(path, text)| match text {
        Ok(text) => read_file(path, text),
        Err(reason) => vec![Err(refuse(path.clone(), reason.clone()).into())],
    });
    combine(read, former)
}

fn list(dir: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        if is_manifest(&name) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn is_manifest(name: &OsString) -> bool {
    let extension = Path::new(name).extension().unwrap_or_default();
    !name.as_bytes().starts_with(b".") && ["yaml", "yml", "json"].iter().any(|known| extension == *known)
}

/// Reads one file. Symbolic links are followed, because a mounted `ConfigMap` consists of them.
fn read_text(path: &Path) -> Result<String, String> {
    let unreadable = |error: io::Error| format!("cannot be read: {error}");
    // Without O_NONBLOCK, opening a FIFO would wait for its writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err("is not a regular file".to_owned());
    }
    let bytes = read_bounded(file).map_err(unreadable)?.ok_or("is larger than 1 MiB")?;
    String::from_utf8(bytes).map_err(|error| format!("is not UTF-8: {}", error.utf8_error()))
}

/// Returns `None` if the file is too large, also when it grows while it is read.
fn read_bounded(file: File) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= MAX_FILE_BYTES).then_some(bytes))
}

fn refuse(file: PathBuf, reason: String) -> Refusal {
    Refusal {
        file,
        line: None,
        kind: None,
        name: None,
        field: None,
        reason,
    }
}
