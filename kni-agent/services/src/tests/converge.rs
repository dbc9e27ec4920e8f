//! Checks random changes, ticks, failed plans and restarts: every step is legal (the maps check that), and in the end
//! the maps hold the rows of a single plan from scratch, except for numbers.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Action {
    /// Services `a` to `d`, each in one of two networks or not at all, some with the same address.
    Services(Vec<Option<bool>>),
    /// State of endpoints 1 to 4 of each Service.
    Slices(Vec<Vec<u8>>),
    Tick,
    /// Plans and carries out this many steps; fails if there are more.
    Plan(usize),
    Restart,
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        2 => prop::collection::vec(any::<Option<bool>>(), 4).prop_map(Action::Services),
        4 => prop::collection::vec(prop::collection::vec(0_u8..4, 4), 4).prop_map(Action::Slices),
        3 => Just(Action::Tick),
        3 => (0_usize..7).prop_map(Action::Plan),
        3 => Just(Action::Plan(usize::MAX)),
        1 => Just(Action::Restart),
    ]
}

fn services(drawn: &[Option<bool>]) -> Vec<Service> {
    let all = NAMES
        .iter()
        .zip(drawn)
        .zip(["10.96.0.1", "10.96.0.1", "10.96.0.2", "10.96.0.3"]);
    let all = all.filter_map(|((name, blue), vip)| {
        Some(Service {
            network: blue.as_ref()?.then(|| network_name("blue")),
            ports: vec![port("", TCP, 80), port("", UDP, 53)],
            ..service(name, &[vip])
        })
    });
    all.collect()
}

fn slices(drawn: &[Vec<u8>]) -> Vec<EndpointSlice> {
    let all = NAMES.iter().zip(drawn).map(|(name, states)| {
        let endpoints = states.iter().enumerate().filter_map(|(position, state)| {
            let address = format!("10.0.0.{}", position + 1);
            Some(match state {
                0 => return None,
                1 => down(&address),
                2 => draining(&address),
                _ => ready(&address),
            })
        });
        let mut slice = slice(name, name, endpoints.collect());
        slice.ports.push(SlicePort {
            protocol: UDP,
            ..slice.ports[0].clone()
        });
        slice
    });
    all.collect()
}

#[derive(Default)]
struct Inputs {
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
}

/// Backends and flags by frontend, and the addresses.
type Meaning = (BTreeMap<ServiceKey, (Vec<String>, u32)>, BTreeSet<AddressKey>);

impl World {
    fn act(&mut self, inputs: &mut Inputs, action: &Action) {
        match action {
            Action::Services(drawn) => inputs.services = services(drawn),
            Action::Slices(drawn) => inputs.slices = slices(drawn),
            Action::Tick => self.tick(),
            Action::Plan(most) => self.plan_some(*most),
            Action::Restart => {
                self.engine = engine(self.maps.tables()).with_quota(self.maps.sizes);
                self.maps.drop_unused_numbers();
            }
        }
        self.engine.set_services(inputs.services.clone());
        self.engine.set_slices(inputs.slices.clone());
    }

    fn plan_some(&mut self, most: usize) {
        let ids = self.ids();
        let steps = self.engine.plan();
        self.maps.carry_out(&steps[..steps.len().min(most)]);
        if steps.len() <= most {
            self.confirm();
            if self.maps.sizes == ServiceQuota::default() {
                assert_eq!(self.engine.plan(), [], "nothing is left to do");
            }
        } else {
            self.maps.failed = true;
        }
        for (key, id) in self.ids() {
            assert_eq!(*ids.get(&key).unwrap_or(&id), id, "the id of {key:?} changed");
        }
    }

    fn ids(&self) -> BTreeMap<ServiceKey, u32> {
        self.maps
            .services
            .iter()
            .map(|(key, value)| (*key, value.service))
            .collect()
    }

    /// The content of the maps without numbers.
    fn meaning(&self) -> Meaning {
        let rows = self.maps.services.iter();
        let rows = rows.map(|(key, value)| (*key, (self.reach(key), value.flags)));
        (rows.collect(), self.maps.addresses.clone())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_way_leads_to_the_same_tables(actions in prop::collection::vec(action(), 1..40), is_small: bool) {
        let sizes = if is_small { ServiceQuota { services: 5, backends: 20 } } else { ServiceQuota::default() };
        let mut inputs = Inputs::default();
        let mut world = World::new(vec![], vec![]).sized(sizes);
        for action in &actions {
            world.act(&mut inputs, action);
        }
        world.reconcile();
        // Changes may wait for room.
        for _ in 0..if is_small { 6 } else { 0 } {
            world.tick();
            world.reconcile();
        }
        let mut fresh = World::new(vec![], vec![]).sized(sizes);
        fresh.set_services(inputs.services.clone());
        fresh.set_slices(inputs.slices.clone());
        prop_assert_eq!(world.meaning(), fresh.meaning());

        world.tick();
        world.tick();
        world.reconcile();
        prop_assert_eq!(world.engine.tables(), &world.maps.tables());
        prop_assert_eq!(world.maps.backends.len(), fresh.maps.backends.len(), "nothing is left behind");
    }
}
