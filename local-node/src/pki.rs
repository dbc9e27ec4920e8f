//! Issues the certificates of a cluster and the kubeconfigs that contain them.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use serde_json::json;

/// The files that all others depend on: certificate and key of the authority, keys for the tokens of service accounts.
pub(crate) const ROOTS: [&str; 4] = ["ca.crt", "ca.key", "sa.key", "sa.pub"];

/// A certificate authority with its key, and the issued files by name.
#[derive(Debug)]
pub(crate) struct Pki {
    issuer: Issuer<'static, KeyPair>,
    authority: String,
    files: BTreeMap<String, String>,
}

/// The subject of a certificate.
pub(crate) struct Subject<'a> {
    /// The stem of its files.
    pub(crate) file: &'a str,
    /// The user, for Kubernetes.
    pub(crate) name: &'a str,
    /// The group, for Kubernetes; may be empty.
    pub(crate) organization: &'a str,
    /// Names and addresses at which it serves.
    pub(crate) alternatives: &'a [&'a str],
}

impl Pki {
    /// A new certificate authority, and a new pair of keys for the tokens of service accounts.
    pub(crate) fn new() -> Result<Self> {
        let key = KeyPair::generate().context("key of the authority")?;
        let certificate = authority().self_signed(&key).context("certificate of the authority")?;
        let accounts = KeyPair::generate().context("key of service accounts")?;
        let texts = [
            certificate.pem(),
            key.serialize_pem(),
            accounts.serialize_pem(),
            accounts.public_key_pem(),
        ];
        Self::with_roots(texts)
    }

    /// The certificate authority and the keys for tokens of an earlier one, from the contents of [`ROOTS`].
    pub(crate) fn with_roots(texts: [String; ROOTS.len()]) -> Result<Self> {
        let [certificate, key, ..] = &texts;
        Ok(Self {
            issuer: Issuer::new(authority(), KeyPair::from_pem(key).context("key of the authority")?),
            authority: certificate.clone(),
            files: ROOTS.map(str::to_owned).into_iter().zip(texts).collect(),
        })
    }

    /// Issues a certificate for both server and client use, as `<file>.crt` and `<file>.key`; returns both texts.
    pub(crate) fn issue(&mut self, subject: &Subject<'_>) -> Result<[String; 2]> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, subject.name);
        if !subject.organization.is_empty() {
            params
                .distinguished_name
                .push(DnType::OrganizationName, subject.organization);
        }
        for alternative in subject.alternatives {
            params.subject_alt_names.push(match alternative.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_name) => SanType::DnsName((*alternative).try_into().context("name of a server")?),
            });
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().with_context(|| format!("key of {}", subject.name))?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .with_context(|| format!("certificate of {}", subject.name))?;
        let texts = [certificate.pem(), key.serialize_pem()];
        for (text, suffix) in texts.iter().zip(["crt", "key"]) {
            self.files.insert(format!("{}.{suffix}", subject.file), text.clone());
        }
        Ok(texts)
    }

    /// Issues a certificate and wraps it into a kubeconfig, `<file>.conf`, for the API server at `server`.
    pub(crate) fn issue_kubeconfig(&mut self, subject: &Subject<'_>, server: &str) -> Result<String> {
        let [certificate, key] = self.issue(subject)?;
        let text = kubeconfig(&self.authority, &certificate, &key, server);
        self.files.insert(format!("{}.conf", subject.file), text.clone());
        Ok(text)
    }

    /// A kubeconfig with a token, such as that of a service account, for the API server at `server`.
    pub(crate) fn token_kubeconfig(&self, token: &str, server: &str) -> String {
        with_user(&self.authority, &json!({ "token": token }), server)
    }

    /// The issued files, by name.
    pub(crate) fn files(&self) -> &BTreeMap<String, String> {
        &self.files
    }
}

/// The certificate of the authority, without its key.
fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "local-node");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::CrlSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    params
}

/// A self-contained kubeconfig; JSON is YAML as well.
fn kubeconfig(authority: &str, certificate: &str, key: &str, server: &str) -> String {
    let user = json!({
        "client-certificate-data": base64(certificate.as_bytes()),
        "client-key-data": base64(key.as_bytes()),
    });
    with_user(authority, &user, server)
}

fn with_user(authority: &str, user: &serde_json::Value, server: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "local", "cluster": {
            "server": server,
            "certificate-authority-data": base64(authority.as_bytes()),
        }}],
        "users": [{ "name": "local", "user": user }],
        "contexts": [{ "name": "local", "context": { "cluster": "local", "user": "local" }}],
        "current-context": "local",
    })
    .to_string()
}

/// Base64 (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = (0..3).fold(0, |word, index| {
            word << 8 | u32::from(chunk.get(index).copied().unwrap_or(0))
        });
        for index in 0..4 {
            let digit = DIGITS
                .get((word >> (18 - 6 * index) & 63) as usize)
                .copied()
                .unwrap_or(b'=');
            text.push(if index <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_standard_are_encoded() {
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn a_kubeconfig_contains_certificate_and_key() {
        let mut pki = Pki::new().unwrap();
        let subject = Subject {
            file: "admin",
            name: "admin",
            organization: "system:masters",
            alternatives: &["node1", "127.0.0.1"],
        };
        let text = pki.issue_kubeconfig(&subject, "https://127.0.0.1:6443").unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let held = config["users"][0]["user"]["client-key-data"].as_str().unwrap();
        assert_eq!(held, base64(pki.files()["admin.key"].as_bytes()));
        assert!(pki.files()["sa.pub"].contains("PUBLIC KEY"));
    }
    #[test]
    fn a_reopened_authority_has_the_same_roots() {
        let first = Pki::new().unwrap();
        let again = Pki::with_roots(ROOTS.map(|name| first.files()[name].clone())).unwrap();
        assert_eq!(first.files(), again.files());
    }
}
