//! Tests that maps of another shape are replaced, that another layout is refused, and that pins of the same layout are
//! retained with all rows.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData};
use kni_common::{
    Direction, Verdict,
    endpoint::{EndpointRow, FLAG_HANDOVER},
    layout::LAYOUT_VERSION,
};
use kni_dataplane::{Dataplane, DataplaneOptions, EndpointConfig};
use kni_integration::{
    Namespaces,
    frames::{Ip, Link, Payload},
    programs::{CAPACITY, Lockstep, Programs, ROOT, action_of, options, publish_unrestricted},
    require,
};
use kni_model::{EndpointId, MacAddr, NetworkId, view::MapView};

const FLOWS: u32 = 4096;

fn views(dataplane: &Dataplane) -> Result<BTreeMap<String, MapView>> {
    Ok(dataplane
        .maps()?
        .into_iter()
        .map(|view| (view.name.clone(), view))
        .collect())
}

/// A map that another program might have left.
struct Bogus {
    map: &'static str,
    kind: &'static str,
    key: u32,
    value: u32,
    entries: u32,
}

const BOGUS: &[Bogus] = &[
    Bogus {
        map: "FLOWS4",
        kind: "lru_hash",
        key: 20,
        value: 40,
        entries: FLOWS,
    },
    Bogus {
        map: "FLOWS6",
        kind: "lru_hash",
        key: 40,
        value: 48,
        entries: FLOWS,
    },
    Bogus {
        map: "FRAGMENTS",
        kind: "lru_hash",
        key: 44,
        value: 4,
        entries: 100,
    },
    Bogus {
        map: "DROPS",
        kind: "hash",
        key: 8,
        value: 16,
        entries: 16 * CAPACITY,
    },
    Bogus {
        map: "COUNTERS",
        kind: "array",
        key: 4,
        value: 16,
        entries: 16 * CAPACITY,
    },
];

#[test]
fn a_pin_of_another_shape_is_replaced() -> Result<()> {
    require!(root, netns, bpf, ip, bpftool);
    Programs::inside("drift", FLOWS, |programs| {
        let right = views(programs.dataplane())?;
        let folder = programs.dataplane().pin_path();
        programs.dataplane().attach("kni3", EndpointId(3))?;
        let (attached, _) = programs.dataplane().programs("kni3", EndpointId(3));
        let program = attached.first().context("an attached program")?.id.to_string();
        drop(programs);
        let node = Namespaces::current("drift")?;
        let mut kinds = BTreeMap::new();
        for bogus in BOGUS {
            let path = folder.join(bogus.map);
            std::fs::remove_file(&path)?;
            let path = path.to_str().context("a path")?;
            let [key, value, entries] = [bogus.key, bogus.value, bogus.entries].map(|number| number.to_string());
            let create = ["map", "create", path, "type", bogus.kind, "key", &key, "value", &value];
            node.run(
                "bpftool",
                &[&create[..], &["entries", &entries, "name", bogus.map]].concat(),
            )?;
            let shown = node.run("bpftool", &["map", "show", "pinned", path])?;
            let id = shown.split(':').next().context("an id")?.trim().parse::<u32>()?;
            kinds.insert(bogus.map, id);
        }
        // An object that is not a map.
        let gates = folder.join("EVENT_GATES");
        std::fs::remove_file(&gates)?;
        node.run(
            "bpftool",
            &["prog", "pin", "id", &program, gates.to_str().context("a path")?],
        )?;

        let mut step = Lockstep::new(Programs::open(FLOWS)?)?;
        let now = views(step.programs().dataplane())?;
        for bogus in BOGUS {
            let (before, after) = (&right[bogus.map], &now[bogus.map]);
            ensure!(after.id != kinds[bogus.map], "{} is still the foreign map", bogus.map);
            let shape = |view: &MapView| (view.kind.clone(), view.key_size, view.value_size, view.max_entries);
            ensure!(shape(after) == shape(before), "{}: {after:?}", bogus.map);
        }
        ensure!(
            now["EVENT_GATES"].kind == right["EVENT_GATES"].kind,
            "{:?}",
            now["EVENT_GATES"]
        );
        for name in ["ENDPOINTS", "ADDRESSES", "ROUTES"] {
            ensure!(now[name].id == right[name].id, "{name} was replaced without need");
        }
        // The programs write into the new maps.
        super::dump::fill(&mut step)?;
        step.compare_tables()?;
        step.compare_counters().map(drop)
    })
}

/// The programs of another layout may still run at interfaces, with the rows of its maps: nothing of them is changed.
#[test]
fn maps_of_another_layout_are_refused() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("refused", FLOWS, |programs| {
        let present = programs.dataplane().pin_path();
        programs.dataplane().attach("kni3", EndpointId(3))?;
        drop(programs);
        let root = Path::new(ROOT);
        for other in [LAYOUT_VERSION - 1, LAYOUT_VERSION + 1] {
            let folder = root.join(format!("v{other}"));
            std::fs::rename(&present, &folder)?;
            let before = paths_below(root)?;
            let error = Dataplane::open(&options(FLOWS)?)
                .err()
                .context("opened beside another layout")?;
            let text = error.to_string();
            for named in [
                folder.display().to_string(),
                format!("layout {other},"),
                format!("layout {LAYOUT_VERSION}:"),
            ] {
                ensure!(text.contains(&named), "{named} is not in {text:?}");
            }
            let after = paths_below(root)?;
            ensure!(after == before, "{before:?} became {after:?}");
            std::fs::rename(&folder, &present)?;
        }
        let programs = Programs::open(FLOWS)?;
        ensure!(
            programs.dataplane().pinned_endpoints()? == [EndpointId(3)],
            "the link is gone"
        );
        Ok(())
    })
}

/// Every path below a folder.
fn paths_below(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut paths = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            }
            paths.insert(entry.path());
        }
    }
    Ok(paths)
}

#[test]
fn pins_of_the_same_layout_keep_flows_and_rows() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("kept", FLOWS, |programs| {
        let mut step = Lockstep::new(programs)?;
        super::dump::fill(&mut step)?;
        let before = views(step.programs().dataplane())?;
        drop(step);
        let programs = Programs::open(FLOWS)?;
        let after = views(programs.dataplane())?;
        for (name, view) in before.iter().filter(|(name, _)| !name.ends_with("_EVENTS")) {
            ensure!(
                (after[name].id, after[name].entries) == (view.id, view.entries),
                "{name}: {view:?}"
            );
        }
        ensure!(
            after["FLOWS4"].entries == 1 && after["FLOWS6"].entries == 1,
            "{after:?}"
        );
        Ok(())
    })
}

/// An agent that was killed while it replaced filters by links has left a flag in the row.
#[test]
fn a_kill_during_a_handover_costs_no_packet() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("handover", FLOWS, |programs| {
        let endpoint = EndpointConfig {
            endpoint: EndpointId(1),
            network: NetworkId::try_from(77)?,
            ipv4: Some([10, 0, 0, 2].into()),
            ipv6: None,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 1, 1]),
            host_access: false,
            xdp: false,
            plugin: None,
            shaped: false,
        };
        publish_unrestricted(programs.dataplane(), &endpoint)?;
        let pin = programs.dataplane().pin_path().join("ENDPOINTS");
        let mut rows: Array<MapData, EndpointRow> = Map::Array(MapData::from_pin(pin)?).try_into()?;
        let row = rows.get(&1, 0)?;
        let flags = row.flags | FLAG_HANDOVER;
        rows.set(1, EndpointRow { flags, ..row }, 0)?;
        programs.dataplane().republish(&endpoint)?;
        let kept = rows.get(&1, 0)?;
        ensure!(
            kept.generation == row.generation && kept.incarnation == row.incarnation,
            "published anew, with a gap: {kept:?} after {row:?}"
        );
        Ok(())
    })
}

/// A new endpoint table counts generations from the start. An old flow of generation 1 must not match the new
/// generation 1, which may be in another network.
#[test]
fn a_new_endpoint_table_revives_no_flow() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("revived", FLOWS, |programs| {
        let mut step = Lockstep::new(programs)?;
        super::dump::fill(&mut step)?;
        let before = views(step.programs().dataplane())?;
        drop(step);
        let larger = DataplaneOptions {
            max_endpoints: 2 * CAPACITY,
            ..options(FLOWS)?
        };
        let (dataplane, events) = Dataplane::open(&larger)?;
        let after = views(&dataplane)?;
        for name in ["ENDPOINTS", "ADDRESSES", "FLOWS4", "FLOWS6"] {
            ensure!(after[name].id != before[name].id, "{name} is the old one");
            ensure!(after[name].entries == 0, "{name} has rows: {:?}", after[name]);
        }
        drop((dataplane, events));
        // The endpoints return in a different order: the old receiver's slot is in another network.
        let mut step = Lockstep::new(Programs::open(FLOWS)?)?;
        let mut red = step_endpoint(2);
        red.network = 78;
        step.publish(1, &step_endpoint(1))?;
        step.publish(2, &red)?;
        let link = Link::new([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 1, 1]);
        let udp = Ip::new([10, 0, 0, 2].into(), [10, 0, 0, 3].into()).packet(&Payload::udp(4000, 53, b""));
        let ran = step.programs().run(Direction::FromPod, 1, &link.frame(&udp))?;
        ensure!(
            ran.action == action_of(Verdict::NoDestination),
            "redirected into another network"
        );
        Ok(())
    })
}

fn step_endpoint(id: u8) -> kni_integration::model::Endpoint {
    kni_integration::model::Endpoint {
        network: 77,
        ipv4: Some([10, 0, 0, 1 + id].into()),
        ipv6: None,
        mac: [2, 0, 0, 0, 0, id],
        host_mac: [2, 0, 0, 0, 1, id],
        host_access: false,
    }
}

#[test]
fn withdrawn_pins_leave_nothing() -> Result<()> {
    require!(root, netns, bpf, ip);
    Programs::inside("unpinned", FLOWS, |programs| {
        programs.dataplane().attach("kni4", EndpointId(4))?;
        ensure!(
            programs.dataplane().pinned_endpoints()? == [EndpointId(4)],
            "no pinned links"
        );
        programs.dataplane().unpin(EndpointId(4))?;
        ensure!(
            programs.dataplane().pinned_endpoints()?.is_empty(),
            "links are still pinned"
        );
        drop(programs);
        kni_dataplane::remove_pins(ROOT.as_ref())?;
        ensure!(!Path::new(ROOT).exists(), "{ROOT} is still there");
        Ok(())
    })
}
