//! Splits a YAML stream into documents, so that a broken one does not affect the others.

/// The part of a file that holds one document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Document<'a> {
    /// The number of lines before it in the file.
    pub(super) lines_before: u32,
    pub(super) text: &'a str,
}

/// Splits at lines that begin a document (`---`) or end one (`...`): YAML 1.2 (9.1.2) allows these nowhere else at the
/// start of a line, not even inside a block scalar. Directives and comments belong to the document that follows. Parts
/// without content are left out.
pub(super) fn split(file: &str) -> Vec<Document<'_>> {
    let mut documents = Vec::new();
    let mut piece = Piece::default();
    let (mut offset, mut line_number) = (0_usize, 0_u32);
    for line in file.split_inclusive('\n') {
        let begins = is_marker(line, "---");
        if begins && piece.has_content {
            documents.extend(piece.cut(file, offset));
            piece = Piece {
                start: offset,
                lines_before: line_number,
                ..Piece::default()
            };
        }
        offset = offset.saturating_add(line.len());
        line_number = line_number.saturating_add(1);
        let ends = is_marker(line, "...");
        if ends {
            documents.extend(piece.cut(file, offset));
            piece = Piece {
                start: offset,
                lines_before: line_number,
                ..Piece::default()
            };
        } else {
            let content = if begins {
                line.get(3..).unwrap_or_default()
            } else {
                line
            };
            // An empty document between two markers has no content either, but a marker must not merge with the next.
            piece.has_content |= begins || !is_prelude(content);
            piece.has_value |= !is_prelude(content);
        }
    }
    documents.extend(piece.cut(file, offset));
    documents
}

/// The document being collected.
#[derive(Default)]
struct Piece {
    start: usize,
    lines_before: u32,
    /// A marker or a value was seen: the next marker begins another document.
    has_content: bool,
    /// Something other than comments and markers was seen.
    has_value: bool,
}

impl Piece {
    fn cut<'a>(&self, file: &'a str, end: usize) -> Option<Document<'a>> {
        let text = file.get(self.start..end)?;
        self.has_value.then_some(Document {
            lines_before: self.lines_before,
            text,
        })
    }
}

fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

/// Whether a line has no content: blank, comment or directive.
fn is_prelude(line: &str) -> bool {
    let text = line.trim();
    text.is_empty() || text.starts_with('#') || line.starts_with('%')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(file: &str) -> Vec<(u32, &str)> {
        split(file).into_iter().map(|d| (d.lines_before, d.text)).collect()
    }

    #[test]
    fn documents_keep_their_line() {
        assert_eq!(pieces("a: 1\n"), [(0, "a: 1\n")]);
        assert_eq!(pieces("a: 1\n---\nb: 2\n"), [(0, "a: 1\n"), (1, "---\nb: 2\n")]);
        assert_eq!(
            pieces("# c\n---\na: 1\n--- # x\nb: 2"),
            [(0, "# c\n---\na: 1\n"), (3, "--- # x\nb: 2")]
        );
        assert_eq!(
            pieces("--- {a: 1}\r\n---\r\nb: 2\r\n"),
            [(0, "--- {a: 1}\r\n"), (1, "---\r\nb: 2\r\n")]
        );
    }

    #[test]
    fn empty_documents_are_left_out() {
        assert_eq!(pieces(""), []);
        assert_eq!(pieces("# only a comment\n\n---\n---\n# and one more\n"), []);
        assert_eq!(pieces("---\n---\na: 1\n---\n"), [(1, "---\na: 1\n")]);
    }

    #[test]
    fn end_markers_and_directives() {
        assert_eq!(
            pieces("a: 1\n...\n%YAML 1.2\n---\nb: 2\n"),
            [(0, "a: 1\n...\n"), (2, "%YAML 1.2\n---\nb: 2\n")]
        );
        assert_eq!(pieces("a: |\n  ---\n  text\nb: ---x\n----\n").len(), 1);
    }
}
