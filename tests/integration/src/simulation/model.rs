//! Predicts what a cluster of another size costs, from two measured sizes.
//!
//! Each resource has a formula with two coefficients, `y = a·x1 + b·x2`. The terms `x1` and `x2` are what causes the
//! cost, counted from the size alone; the coefficients are fitted on two sizes. A third size shows how wrong a formula
//! is.

use std::collections::BTreeMap;

/// The size of a cluster and what happens in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// Nodes.
    pub nodes: f64,
    /// Pods that stay.
    pub pods: f64,
    /// Networks, the default one included.
    pub networks: f64,
    /// The share of the pods that are in the default network, which every node follows.
    pub flat: f64,
    /// Pods that start in a second; as many end.
    pub rate: f64,
}

impl Size {
    /// The goal that the design names: 5 000 nodes, 150 000 pods, 1 000 networks, 100 starts a second.
    pub const fn goal(flat: f64) -> Self {
        Self {
            nodes: 5000.0,
            pods: 150_000.0,
            networks: 1000.0,
            flat,
            rate: 100.0,
        }
    }

    /// Pods of one network that is not the default one.
    pub fn pods_of_tenant(&self) -> f64 {
        self.pods * (1.0 - self.flat) / (self.networks - 1.0).max(1.0)
    }

    /// Nodes that have a pod in one such network, where pods are placed at random: the nodes that follow it.
    pub fn followers_of_tenant(&self) -> f64 {
        self.nodes * (1.0 - (1.0 - 1.0 / self.nodes).powf(self.pods_of_tenant()))
    }

    /// Such networks that one node follows.
    pub fn tenants_of_node(&self) -> f64 {
        (self.networks - 1.0) * self.followers_of_tenant() / self.nodes
    }

    /// Nodes that learn of a change of one pod, averaged over the pods.
    pub fn concerned(&self) -> f64 {
        self.flat * self.nodes + (1.0 - self.flat) * self.followers_of_tenant()
    }

    /// The probability that a pod that starts is the first of its network on its node: the node claims a block.
    pub fn first_on_node(&self) -> f64 {
        (1.0 - self.flat) * (1.0 - self.followers_of_tenant() / self.nodes)
    }

    /// The objects of other nodes that one node follows: endpoints, and members and blocks of its networks.
    pub fn followed(&self) -> f64 {
        self.nodes * (1.0 + 3.0) + self.tenants_of_node() * self.followers_of_tenant() * 2.0
    }
}

/// One formula.
pub struct Formula {
    /// The resource.
    pub name: &'static str,
    /// The unit of the result.
    pub unit: &'static str,
    /// The terms in words.
    pub terms: [&'static str; 2],
    /// The terms of a size.
    pub of: fn(&Size) -> [f64; 2],
    /// The aim at [`Size::goal`], where the design has one.
    pub aim: Option<f64>,
}

/// All formulas. Their names are the keys of what is measured.
pub const FORMULAS: [Formula; 9] = [
    Formula {
        name: "writes",
        unit: "requests/s",
        terms: ["pod starts", "starts that claim a block"],
        of: |size| [size.rate, size.rate * size.first_on_node()],
        aim: Some(1000.0),
    },
    Formula {
        name: "events",
        unit: "events/s",
        terms: ["changes of pods times nodes concerned", "nodes"],
        of: |size| [size.rate * size.concerned(), size.nodes],
        aim: None,
    },
    Formula {
        name: "fanout",
        unit: "bytes/s",
        terms: ["changes of pods times nodes concerned", "nodes"],
        of: |size| [size.rate * size.concerned(), size.nodes],
        aim: Some(200e6),
    },
    Formula {
        name: "api-server cpu",
        unit: "cores",
        terms: ["changes of pods times nodes concerned", "nodes"],
        of: |size| [size.rate * size.concerned(), size.nodes],
        aim: None,
    },
    Formula {
        name: "etcd cpu",
        unit: "cores",
        terms: ["pod starts", "nodes"],
        of: |size| [size.rate, size.nodes],
        aim: None,
    },
    Formula {
        name: "controller cpu",
        unit: "cores",
        terms: ["pod starts", "pods"],
        of: |size| [size.rate, size.pods],
        aim: None,
    },
    Formula {
        name: "agent cpu",
        unit: "cores",
        terms: ["an agent", "changes that it receives a second times objects followed"],
        of: |size| [1.0, size.rate * size.concerned() / size.nodes * size.followed()],
        aim: Some(0.02),
    },
    Formula {
        name: "agent memory",
        unit: "bytes",
        terms: ["an agent", "objects followed"],
        of: |size| [1.0, size.followed()],
        aim: Some(120.0 * 1024.0 * 1024.0),
    },
    Formula {
        name: "agent start",
        unit: "bytes",
        terms: ["an agent", "objects followed"],
        of: |size| [1.0, size.followed()],
        aim: Some(10e6),
    },
];

/// What was measured, by the name of the formula.
pub type Measured = BTreeMap<String, f64>;

impl Formula {
    /// The coefficients of two measured sizes; negative ones, which no cost has, become zero. `None` if the sizes are
    /// not independent.
    pub fn fit(&self, first: (&Size, f64), second: (&Size, f64)) -> Option<[f64; 2]> {
        let ([a1, b1], [a2, b2]) = ((self.of)(first.0), (self.of)(second.0));
        let determinant = a1.mul_add(b2, -(a2 * b1));
        if determinant.abs() <= 1e-9 * (a1 * b2).abs() {
            return None;
        }
        let a = first.1.mul_add(b2, -(second.1 * b1)) / determinant;
        let b = a1.mul_add(second.1, -(a2 * first.1)) / determinant;
        Some(match (a < 0.0, b < 0.0) {
            (true, _) => [0.0, least_squares([b1, b2], [first.1, second.1])],
            (_, true) => [least_squares([a1, a2], [first.1, second.1]), 0.0],
            _ => [a, b],
        })
    }

    /// The result for a size.
    pub fn predict(&self, coefficients: [f64; 2], size: &Size) -> f64 {
        let [x1, x2] = (self.of)(size);
        coefficients[0].mul_add(x1, coefficients[1] * x2)
    }
}

/// The factor that fits `y = factor · x` best.
fn least_squares(x: [f64; 2], y: [f64; 2]) -> f64 {
    let square: f64 = x.iter().map(|x| x * x).sum();
    let product: f64 = x.iter().zip(y).map(|(x, y)| x * y).sum();
    if square > 0.0 { product / square } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(nodes: f64, networks: f64) -> Size {
        Size {
            nodes,
            pods: nodes * 30.0,
            networks,
            flat: 0.1,
            rate: 5.0,
        }
    }

    fn near(found: f64, expected: f64) {
        assert!(
            (found - expected).abs() <= expected.abs() * 1e-6,
            "{found} instead of {expected}"
        );
    }

    #[test]
    fn the_terms_of_a_size_are_counted_from_it() {
        let goal = Size::goal(0.0);
        near(goal.pods_of_tenant().round(), 150.0);
        // Some of 150 pods share a node.
        assert!(
            (146.0..150.0).contains(&goal.followers_of_tenant()),
            "{}",
            goal.followers_of_tenant()
        );
        assert!(
            (29.0..30.0).contains(&goal.tenants_of_node()),
            "{}",
            goal.tenants_of_node()
        );
        near(goal.concerned(), goal.followers_of_tenant());
        near(Size::goal(1.0).concerned(), 5000.0);
        assert!(goal.first_on_node() > 0.95);
        let one = size(1.0, 2.0);
        near(one.followers_of_tenant(), 1.0);
        assert!(one.first_on_node() < 1e-9);
    }

    #[test]
    fn a_formula_that_holds_is_found_and_predicts_a_third_size() {
        let sizes = [size(50.0, 12.0), size(100.0, 25.0), size(200.0, 50.0)];
        for formula in &FORMULAS {
            let real = [3.0, 0.25];
            let [first, second, third] = sizes.map(|size| formula.predict(real, &size));
            let Some(fitted) = formula.fit((&sizes[0], first), (&sizes[1], second)) else {
                panic!("{}: the sizes are not independent", formula.name);
            };
            near(formula.predict(fitted, &sizes[2]), third);
        }
    }

    #[test]
    fn no_cost_is_negative() {
        let sizes = [size(50.0, 12.0), size(100.0, 25.0)];
        for formula in &FORMULAS {
            for measured in [[10.0, 1.0], [1.0, 1000.0]] {
                let fitted = formula.fit((&sizes[0], measured[0]), (&sizes[1], measured[1])).unwrap();
                assert!(fitted.iter().all(|one| *one >= 0.0), "{}: {fitted:?}", formula.name);
            }
        }
    }

    #[test]
    fn sizes_that_differ_in_nothing_give_no_coefficients() {
        let one = size(50.0, 12.0);
        assert!(
            FORMULAS
                .iter()
                .all(|formula| formula.fit((&one, 1.0), (&one, 2.0)).is_none())
        );
    }
}
