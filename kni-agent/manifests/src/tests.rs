//! Checks files and folders as operators write them, valid and invalid.

use std::{fmt::Write as _, fs, ops::Add as _, os::unix::fs::symlink, path::PathBuf};

use super::*;

mod objects;
mod watch;

fn manifest(name: &str, subnet: &str) -> String {
    format!("apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: {name}\nspec:\n  subnets: [{subnet}]\n")
}

fn parse(text: &str) -> ManifestSet {
    parse_file(Path::new("a.yaml"), text)
}

fn names(set: &ManifestSet) -> Vec<&str> {
    set.networks.iter().map(|(spec, _)| spec.name.as_str()).collect()
}

/// The only refusal of a file without networks.
fn refused(text: &str) -> Refusal {
    let set = parse(text);
    assert_eq!((set.networks.len(), set.refused.len()), (0, 1), "{text}: {set:?}");
    set.refused.into_iter().next().unwrap()
}

#[test]
fn the_examples_are_valid() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples/networks");
    let set = ManifestSource::new(dir).load().unwrap();
    assert_eq!(set.refused, []);
    assert_eq!(names(&set), ["blue", "default", "red"]);
    assert_eq!(set.default_network().unwrap().name.as_str(), "default");
    assert_eq!(set.networks[0].0.subnets, set.networks[2].0.subnets);
}

#[test]
fn one_bad_document_leaves_the_others() {
    let text = format!(
        "# networks\n{}---\nkind: [PodNetwork\n---\n{}---\n{}",
        manifest("blue", "10.0.0.0/16"),
        manifest("bad", "10.0.0.1/16"),
        manifest("red", "10.0.0.0/16"),
    );
    let set = parse(&text);
    assert_eq!(names(&set), ["blue", "red"]);
    let lines: Vec<_> = set.networks.iter().map(|(_, origin)| origin.line).collect();
    assert_eq!(lines, [2, 18]);
    assert_eq!(set.refused.len(), 2, "{:?}", set.refused);
    assert!((8..=10).contains(&set.refused[0].line.unwrap()), "{}", set.refused[0]);
    assert_eq!(
        set.refused[1].to_string(),
        "a.yaml:16: PodNetwork bad: spec.subnets[0]: 10.0.0.1/16 has host bits set; write 10.0.0.0/16"
    );
}

const HEAD: &str = "apiVersion: kni.dev/v1alpha1\nkind: PodNetwork\nmetadata:\n  name: blue\n";
const SPEC: &str = "spec:\n  subnets:\n  - 10.0.0.0/16\n";

fn check(text: &str, line: u32, field: &str, reason: &str) {
    let refusal = refused(text);
    assert_eq!(
        (refusal.line, refusal.field.as_deref().unwrap_or_default()),
        (Some(line), field),
        "{text}\n{refusal}"
    );
    assert!(refusal.reason.contains(reason), "{text}\n{refusal}");
}

#[test]
fn errors_in_the_spec_name_line_and_field() {
    for (last_line, field, reason) in [
        ("  - 10.0.3.0/24", "spec.subnets[1]", "overlaps 10.0.0.0/16"),
        ("  - 7", "spec.subnets[1]", "expected a string"),
        ("  mtu: 1000", "spec.mtu", "1280"),
        ("  mtu: big", "spec.mtu", "invalid type"),
        ("  mtu: -1", "spec.mtu", "invalid value"),
        ("  enabled: yes", "spec.enabled", "boolean"),
        ("  gateway: {}", "spec.gateway", "unknown field `gateway`"),
        ("  egress: {mode: Route}", "spec.egress.mode", "default network"),
        ("  egress: {adresses: []}", "spec.egress.adresses", "unknown field"),
        (
            "  serviceSubnets: [10.0.1.0/24]",
            "spec.serviceSubnets[0]",
            "overlaps 10.0.0.0/16",
        ),
        ("  topology: Layer2", "spec.topology", "Layer2"),
        (
            "  excludeSubnets: [10.0.3.0/24, 10.1.0.0/24]",
            "spec.excludeSubnets[1]",
            "not inside any",
        ),
        ("status: {}", "status", "not supported"),
        ("spec: {}", "", "duplicate"),
    ] {
        check(&format!("{HEAD}{SPEC}{last_line}\n"), 8, field, reason);
    }
    check(
        &format!("{HEAD}spec:\n  mtu: 1500\n"),
        5,
        "spec.subnets",
        "has 0 entries, not 1 to 16",
    );
    check(&format!("{HEAD}spec:\n"), 5, "spec", "invalid type: null");
}

#[test]
fn errors_around_the_spec_name_line_and_field() {
    check(HEAD, 1, "", "missing field `spec`");
    check(
        &format!("{HEAD}  namespace: x\n{SPEC}"),
        5,
        "metadata.namespace",
        "not supported",
    );
    check(
        &HEAD.replace("  name: blue\n", "  labels: {}\n").add(SPEC),
        3,
        "metadata.name",
        "is missing",
    );
    check(&manifest("Blue", "10.0.0.0/16"), 4, "metadata.name", "DNS-1123");
    check(&manifest("5", "10.0.0.0/16"), 4, "metadata.name", "expected a string");
    check("- a\n- b\n", 1, "", "is not a mapping");
    check("just text", 1, "", "is not a mapping");
    check("kind: PodNetwork\n", 1, "apiVersion", "is missing");
    check("apiVersion: v1\nkind: 5\n", 2, "kind", "is not a string");
}

#[test]
fn lines_stay_right_in_later_documents() {
    let text = format!(
        "{}---\n# two\n{}",
        manifest("a", "10.0.0.0/16"),
        manifest("b", "10.0.0.0/16").replace("subnets", "subnet")
    );
    let set = parse(&text);
    assert_eq!(
        (set.refused[0].line, set.refused[0].field.as_deref()),
        (Some(14), Some("spec.subnet"))
    );
    let broken = parse(&format!("{}---\na: [1\nb: 2\n", manifest("a", "10.0.0.0/16")));
    assert!(
        broken.refused[0].line.is_some_and(|line| (8..=10).contains(&line)),
        "{:?}",
        broken.refused
    );
    assert!(!broken.refused[0].reason.contains("line 1"), "{}", broken.refused[0]);
}

#[test]
fn other_kinds_are_refused_by_kind() {
    let refusal = refused("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x, namespace: y}\ndata: {a: b}\n");
    let text = refusal.to_string();
    let start = "a.yaml:2: ConfigMap y/x: kind: kind ConfigMap of apiVersion v1 is not served; served are \
                 PodNetwork of kni.dev/v1alpha1, EgressPolicy of kni.dev/v1alpha1, EgressAddressPool of kni.dev/v1alpha1, \
                 NetworkPolicy of networking.k8s.io/v1, ";
    assert!(text.starts_with(start), "{text}");
    let other = refused(&manifest("a", "10.0.0.0/16").replace("v1alpha1", "v2"));
    assert_eq!((other.line, other.field.as_deref()), (Some(1), Some("apiVersion")));
}

#[test]
fn json_and_kubectl_output_are_read() {
    let json = "{\n\t\"apiVersion\": \"kni.dev/v1alpha1\", \"kind\": \"PodNetwork\",\n\t\"metadata\": {\"name\": \"a\", \"uid\": \"1\"},\n\t\"spec\": {\"subnets\": [\"10.0.0.0/16\",\n\t\t\"fd00::/64\"], \"mtu\": 9000}\n}\n";
    let set = parse_file(Path::new("a.json"), json);
    assert_eq!(set.refused, []);
    assert_eq!(set.networks[0].0.mtu, 9000);
    let bad = parse_file(Path::new("a.json"), &json.replace("fd00::/64", "fe80::/64"));
    assert_eq!(
        (bad.refused[0].line, bad.refused[0].field.as_deref()),
        (Some(5), Some("spec.subnets[1]"))
    );
    let exported = manifest("a", "10.0.0.0/16").replace(
        "  name",
        "  creationTimestamp: \"2030-01-02T03:04:05Z\"\n  labels: {a.b/c: d}\n  name",
    );
    assert_eq!(parse(&exported).refused, []);
}

#[test]
fn names_and_the_default_are_taken_once() {
    let dir = tempfile::tempdir().unwrap();
    let default = |name| manifest(name, "10.0.0.0/16") + "  default: true\n";
    fs::write(
        dir.path().join("b.yaml"),
        manifest("one", "10.1.0.0/16") + "---\n" + &default("two"),
    )
    .unwrap();
    fs::write(dir.path().join("a.yml"), default("one")).unwrap();
    fs::write(dir.path().join("c.txt"), "ignored").unwrap();
    fs::write(dir.path().join(".c.yaml"), "ignored").unwrap();
    let set = ManifestSource::new(dir.path()).load().unwrap();
    assert_eq!(names(&set), ["one"]);
    assert_eq!(set.default_network().unwrap().subnets, ["10.0.0.0/16".parse().unwrap()]);
    let refused: Vec<_> = set
        .refused
        .iter()
        .map(|r| (r.line, r.name.as_deref(), r.field.as_deref()))
        .collect();
    assert_eq!(
        refused,
        [
            (Some(4), Some("one"), Some("metadata.name")),
            (Some(14), Some("two"), Some("spec.default")),
        ]
    );
    assert!(set.refused[1].reason.contains("a.yml:1"), "{}", set.refused[1]);
    assert_eq!(parse(&manifest("x", "10.0.0.0/16")).default_network(), None);
}

#[test]
fn unreadable_files_are_refused_and_the_rest_counts() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("0-good.yaml"), manifest("good", "10.0.0.0/16")).unwrap();
    fs::write(path("1-latin1.yaml"), b"name: \xe9\n").unwrap();
    let full = manifest("full", "10.0.0.0/16") + "#";
    fs::write(
        path("2-full.yaml"),
        full.clone() + &"x".repeat(1024 * 1024 - full.len()),
    )
    .unwrap();
    fs::write(path("3-large.yaml"), "#".repeat(1024 * 1024 + 1)).unwrap();
    fs::create_dir(path("4-dir.yaml")).unwrap();
    nix::unistd::mkfifo(&path("5-fifo.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    symlink("nowhere", path("6-dangling.yaml")).unwrap();
    fs::write(outside.path().join("real"), manifest("linked", "10.0.0.0/16")).unwrap();
    symlink(outside.path().join("real"), path("7-link.yaml")).unwrap();
    let set = ManifestSource::new(dir.path()).load().unwrap();
    assert_eq!(names(&set), ["good", "full", "linked"]);
    let refused: Vec<_> = set
        .refused
        .iter()
        .map(|r| (r.file.clone(), r.line, r.reason.as_str()))
        .collect();
    let expect = [
        ("1-latin1", "is not UTF-8"),
        ("3-large", "larger than"),
        ("4-dir", "regular"),
        ("5-fifo", "regular"),
        ("6-dangling", "cannot be read"),
    ];
    assert_eq!(refused.len(), expect.len(), "{refused:?}");
    for ((file, line, reason), (name, why)) in refused.iter().zip(expect) {
        assert_eq!((file, *line), (&path(&format!("{name}.yaml")), None));
        assert!(reason.contains(why), "{name}: {reason}");
    }
    assert!(matches!(
        ManifestSource::new(path("missing")).load(),
        Err(ManifestError::Folder { .. })
    ));
}

#[test]
fn hostile_yaml_is_refused_not_expanded() {
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for i in 1..12 {
        let last = i - 1;
        writeln!(bomb, "a{i}: &a{i} [{}]", vec![format!("*a{last}"); 10].join(", ")).unwrap();
    }
    refused(&bomb);
    refused(&"[".repeat(100_000));
    refused(&"- ".repeat(100_000));
    refused(&("a: ".to_owned() + &"{a: ".repeat(5_000)));
    let anchored = manifest("a", "&net 10.0.0.0/16").replace("subnets", "excludeSubnets: [*net]\n  subnets");
    refused(&anchored);
}

proptest::proptest! {
    #[test]
    fn any_text_is_answered(text in "([a-z]{1,8}: |- |\n|---\n|\\.\\.\\.\n|  |PC|\\{|\\}|\\[|\\]|\"|'|&a|\\*a|#|%|\t|\\||é|.){0,60}") {
        let lines = u32::try_from(text.split('\n').count()).unwrap();
        for refusal in parse(&text).refused {
            proptest::prop_assert!(refusal.line.is_some_and(|l| (1..=lines + 1).contains(&l)), "{}", refusal);
        }
    }

    #[test]
    fn cut_off_manifests_are_answered(at in 0_usize..400) {
        let whole = manifest("a", "10.0.0.0/16, fd00::/64") + "---\n" + &manifest("b", "10.0.0.0/16");
        if let Some(text) = whole.get(..at) {
            let set = parse(text);
            proptest::prop_assert!(set.networks.len() <= 2);
        }
    }
}

#[test]
fn refusals_of_files_name_the_file_alone() {
    let refusal = Refusal {
        file: PathBuf::from("d/a.yaml"),
        line: None,
        kind: None,
        name: None,
        field: None,
        reason: "is odd".to_owned(),
    };
    assert_eq!(refusal.to_string(), "d/a.yaml: is odd");
}
