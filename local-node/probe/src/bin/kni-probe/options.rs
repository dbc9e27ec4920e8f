//! The words of the command line after the task.

/// `--name value` pairs and plain words.
#[derive(Debug, Default, Clone)]
pub(crate) struct Options {
    words: Vec<String>,
    named: Vec<(String, String)>,
}

impl Options {
    /// Reads them; every option has a value.
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(word) = words.next() {
            match word.strip_prefix("--") {
                None => options.words.push(word),
                Some(name) => {
                    let value = words.next().ok_or_else(|| format!("{word} lacks its value"))?;
                    options.named.push((name.into(), value));
                }
            }
        }
        Ok(options)
    }

    /// The plain word at `index`, called `what` in the error.
    pub(crate) fn word(&self, index: usize, what: &str) -> Result<&str, String> {
        let word = self.words.get(index).map(String::as_str);
        word.ok_or_else(|| format!("{what} is missing"))
    }

    /// The last value of `--name`.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        let mut values = self.named.iter().filter(|(n, _)| n == name);
        values.next_back().map(|(_, value)| value.as_str())
    }

    /// All values of `--name` as ports.
    pub(crate) fn ports(&self, name: &str) -> Result<Vec<u16>, String> {
        let values = self.named.iter().filter(|(n, _)| n == name);
        values
            .map(|(_, value)| value.parse().map_err(|e| format!("--{name} {value}: {e}")))
            .collect()
    }
}
