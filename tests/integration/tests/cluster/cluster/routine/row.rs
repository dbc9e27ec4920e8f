//! Checks one row of the table: an operation and what it may cost, against what was measured.

use super::{
    measured::{Class, DENIED, Measured, Refused},
    objects::Difference,
    operations::Operation,
};

/// What an operation costs a class of traffic; a class without it loses nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// It loses something, else the operation was none.
    Must,
    /// It may lose something.
    May,
}

/// A field that an operation changes, by kind and a part of its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) kind: &'static str,
    pub(super) field: &'static str,
    /// Whether it is wrong that the field is the same.
    pub(super) must: bool,
}

impl Change {
    pub(super) const fn must(kind: &'static str, field: &'static str) -> Self {
        let must = true;
        Self { kind, field, must }
    }

    pub(super) const fn may(kind: &'static str, field: &'static str) -> Self {
        let must = false;
        Self { kind, field, must }
    }

    fn is_of(&self, difference: &Difference) -> bool {
        difference.kind == self.kind && difference.path.contains(self.field)
    }
}

/// One operation and its expectation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) operation: Operation,
    pub(super) losses: &'static [(Class, Loss)],
    pub(super) changes: &'static [Change],
    /// Reasons beside the policy for which packets of the denied pairs are dropped.
    pub(super) reasons: &'static [&'static str],
}

impl Row {
    /// A row of which nothing is lost and no object is different afterwards.
    pub(super) const fn whole(name: &'static str, operation: Operation) -> Self {
        Self {
            name,
            operation,
            losses: &[],
            changes: &[],
            reasons: &[],
        }
    }
}

/// What is wrong with the objects: changes that are not expected, and expected ones that are missing.
pub(super) fn wrong_objects(changes: &[Change], differences: &[Difference]) -> Vec<String> {
    let expected = |difference: &&Difference| changes.iter().any(|change| change.is_of(difference));
    let surplus = differences.iter().filter(|difference| !expected(difference));
    let mut wrong: Vec<String> = surplus.map(ToString::to_string).collect();
    let missing = changes
        .iter()
        .filter(|change| change.must && !differences.iter().any(|difference| change.is_of(difference)));
    wrong.extend(missing.map(|change| format!("{} {} has not changed", change.kind, change.field)));
    wrong
}

/// Everything that is wrong with a row.
pub(super) fn evaluate(row: &Row, measured: &Measured) -> Vec<String> {
    let mut wrong = Vec::new();
    for class in Class::ALL {
        let totals = measured.of(class);
        let loss = row.losses.iter().find(|(of, _)| *of == class).map(|(_, loss)| *loss);
        let is_right = match loss {
            None => totals.is_whole(),
            Some(Loss::Must) => totals.sent > 0 && !totals.is_whole(),
            Some(Loss::May) => totals.sent > 0,
        };
        if !is_right {
            wrong.push(format!("{class:?}: {totals:?}, expected loss: {loss:?}"));
        }
    }
    for (class, server, report) in &measured.streams {
        if report.identities.iter().any(|identity| identity != server) {
            wrong.push(format!("{class:?}: {:?} answered for {server}", report.identities));
        }
    }
    for (what, report) in &measured.own {
        if report.sent == 0 || report.lost() != 0 || report.broken.is_some() {
            wrong.push(format!("{what}: {report:?}"));
        }
    }
    wrong.extend(wrong_refusals(row, &measured.refused));
    wrong.extend(wrong_objects(row.changes, &measured.differences));
    wrong
}

fn wrong_refusals(row: &Row, refused: &Refused) -> Option<String> {
    let is_right = refused.sent > 0
        && refused.is_complete(row.reasons)
        && refused.received == 0
        && refused.dropped.contains_key(DENIED)
        && row.reasons.iter().all(|reason| refused.dropped.contains_key(*reason));
    (!is_right).then(|| format!("denied pairs: {refused:?}"))
}

#[cfg(test)]
mod tests {
    use kni_integration::traffic::StreamReport;

    use super::*;

    const CHANGES: &[Change] = &[Change::must("Node", "uid"), Change::may("Node", "labels")];
    const WHOLE: Row = Row::whole("nothing", Operation::Nothing);

    fn report() -> StreamReport {
        StreamReport {
            sent: 10,
            answered: 10,
            identities: ["server".to_owned()].into(),
            ..StreamReport::default()
        }
    }

    fn measured() -> Measured {
        Measured {
            streams: Class::ALL.map(|class| (class, "server".to_owned(), report())).to_vec(),
            refused: Refused {
                sent: 5,
                dropped: [(DENIED.to_owned(), 5)].into(),
                received: 0,
            },
            ..Measured::default()
        }
    }

    fn difference() -> Difference {
        Difference {
            kind: "Node".into(),
            object: "node1".into(),
            path: "metadata.uid".into(),
            values: [Some("1".into()), Some("2".into())],
        }
    }

    #[test]
    fn a_row_without_a_loss_is_right() {
        assert!(evaluate(&WHOLE, &measured()).is_empty());
    }

    #[test]
    fn every_kind_of_fault_is_found() {
        let spoil: [fn(&mut Measured); 11] = [
            |measured| measured.streams[1].2.answered -= 1,
            |measured| measured.streams[4].2.broken = Some("closed".into()),
            |measured| measured.streams[3].2.identities = ["other".to_owned()].into(),
            |measured| measured.streams[0].2 = StreamReport::default(),
            |measured| drop(measured.streams.pop()),
            |measured| measured.own.push(("own".into(), StreamReport::default())),
            |measured| measured.refused.received = 1,
            |measured| measured.refused.sent += 1,
            |measured| measured.refused = Refused::default(),
            |measured| measured.refused.dropped = [("no_route".to_owned(), 5)].into(),
            |measured| measured.differences.push(difference()),
        ];
        for (number, spoil) in spoil.into_iter().enumerate() {
            let mut measured = measured();
            spoil(&mut measured);
            assert_eq!(evaluate(&WHOLE, &measured).len(), 1, "fault {number}");
        }
    }

    #[test]
    fn what_must_happen_is_missed() {
        let mut row = WHOLE;
        row.losses = &[(Class::Third, Loss::Must)];
        row.changes = CHANGES;
        row.reasons = &["no_route"];
        let wrong = evaluate(&row, &measured());
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        let mut seen = measured();
        seen.streams[3].2.answered -= 1;
        seen.refused.dropped = [(DENIED.to_owned(), 4), ("no_route".to_owned(), 1)].into();
        seen.differences.push(difference());
        assert!(evaluate(&row, &seen).is_empty());
    }
}
