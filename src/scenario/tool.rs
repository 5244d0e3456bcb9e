//! The tools offered to a session.
//!
//! Tools come in [`FAMILIES`] of disjoint names, one family a session in turn, so that a neighbour's tool in an answer
//! is a leak between sessions. No parameter is optional and no other is allowed: whatever differs shows.

use rand::{Rng, RngExt};
use serde_json::{Map, Value, json};

use super::{Content, fill};

const NOUNS: &[&str] = &[
    "order", "ticket", "flight", "invoice", "parcel", "patient", "sensor", "contract", "meeting", "recipe", "vehicle",
    "account", "incident", "booking", "survey", "shipment",
];

/// How many families of tools there are: sessions closer than this share no tool.
pub(super) const FAMILIES: u64 = NOUNS.len() as u64;

/// A verb and its parameters beside `ref`; the text parameter, which takes the remaining bytes, comes last.
const VERBS: &[(&str, &[(&str, Kind)])] = &[
    ("lookup", &[("query", Kind::Text)]),
    ("update", &[("urgent", Kind::Flag), ("note", Kind::Text)]),
    ("open", &[("details", Kind::Record), ("title", Kind::Text)]),
    ("count", &[("limit", Kind::Whole), ("filter", Kind::Text)]),
    ("cancel", &[("at", Kind::Whole), ("reason", Kind::Text)]),
    ("assign", &[("tags", Kind::List), ("owner", Kind::Text)]),
    ("price", &[("amount", Kind::Real), ("memo", Kind::Text)]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Flag,
    Whole,
    Real,
    List,
    Record,
}

/// One tool: its name and how to fill its arguments.
#[derive(Debug, Clone)]
pub(super) struct Tool {
    /// Function name.
    pub(super) name: String,
    verb: usize,
}

/// The tools of the session numbered `session`: `count` of its family's, in a seeded order.
pub(super) fn offer(rng: &mut impl Rng, session: u64, count: usize) -> Vec<Tool> {
    let noun = NOUNS[(session % FAMILIES) as usize];
    let mut verbs: Vec<_> = (0..VERBS.len()).collect();
    for place in 0..count.min(verbs.len()) {
        verbs.swap(place, rng.random_range(place..VERBS.len()));
    }
    verbs.truncate(count);
    verbs.into_iter().map(|verb| Tool { name: format!("{noun}_{}", VERBS[verb].0), verb }).collect()
}

/// Every tool name that the session numbered `session` can never be offered.
pub(super) fn foreign(session: u64) -> Vec<String> {
    let own = (session % FAMILIES) as usize;
    let nouns = NOUNS.iter().enumerate().filter(|(family, _)| *family != own);
    nouns.flat_map(|(_, noun)| VERBS.iter().map(move |(verb, _)| format!("{noun}_{verb}"))).collect()
}

impl Tool {
    /// The member of the request's `tools` array.
    pub(super) fn definition(&self) -> Value {
        let mut properties = Map::new();
        properties.insert("ref".into(), json!({"type": "string"}));
        for (name, kind) in VERBS[self.verb].1 {
            properties.insert((*name).into(), kind.schema());
        }
        let (noun, verb) = self.name.split_once('_').unwrap_or((&self.name, "use"));
        json!({"type": "function", "function": {
            "name": self.name,
            "description": format!("{verb} one {noun}"),
            "parameters": closed(properties),
        }})
    }

    /// Arguments that meet the schema; the last text is left empty and its name returned.
    pub(super) fn arguments(
        &self,
        rng: &mut impl Rng,
        content: Content,
        reference: &str,
    ) -> (Map<String, Value>, &'static str) {
        let mut arguments = Map::new();
        arguments.insert("ref".into(), json!(reference));
        let mut last = "ref";
        for (name, kind) in VERBS[self.verb].1 {
            arguments.insert((*name).into(), kind.value(rng, content));
            last = name;
        }
        (arguments, last)
    }

    /// What a task turn asks for in words.
    pub(super) fn task(&self, reference: &str, subject: &str) -> String {
        format!("Use `{}` with ref \"{reference}\" for this matter: {subject}", self.name)
    }
}

impl Kind {
    fn schema(self) -> Value {
        match self {
            Self::Text => json!({"type": "string"}),
            Self::Flag => json!({"type": "boolean"}),
            Self::Whole => json!({"type": "integer"}),
            Self::Real => json!({"type": "number"}),
            Self::List => json!({"type": "array", "items": {"type": "string"}}),
            Self::Record => {
                let mut place = Map::new();
                place.insert("name".into(), json!({"type": "string"}));
                place.insert("code".into(), json!({"type": "integer"}));
                let mut record = Map::new();
                record.insert("name".into(), json!({"type": "string"}));
                record.insert("place".into(), closed(place));
                closed(record)
            }
        }
    }

    fn value(self, rng: &mut impl Rng, content: Content) -> Value {
        match self {
            Self::Text => json!(""),
            Self::Flag => json!(rng.random_ratio(1, 2)),
            Self::Whole => fill::whole(rng, content),
            Self::Real => fill::real(rng, content),
            Self::List if content == Content::Empty => json!([]),
            Self::List => json!([fill::label(rng), fill::text(rng, content, 4)]),
            Self::Record if content == Content::Empty => json!({"name": "", "place": {"name": "", "code": 0}}),
            Self::Record => json!({
                "name": fill::label(rng),
                "place": {"name": fill::text(rng, content, 3), "code": fill::whole(rng, content)},
            }),
        }
    }
}

/// An object schema with every property required and no other allowed.
fn closed(properties: Map<String, Value>) -> Value {
    let required: Vec<_> = properties.keys().cloned().collect();
    let mut schema = Map::new();
    schema.insert("type".into(), json!("object"));
    schema.insert("properties".into(), Value::Object(properties));
    schema.insert("required".into(), json!(required));
    schema.insert("additionalProperties".into(), json!(false));
    Value::Object(schema)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Seed;

    #[test]
    fn neighbours_share_no_tool_and_know_each_other_as_foreign() {
        for session in 0..FAMILIES {
            let own = offer(&mut Seed(session).rng(), session, 5);
            assert_eq!(own.len(), 5);
            let next = offer(&mut Seed(9).rng(), session + 1, 5);
            assert!(own.iter().all(|tool| next.iter().all(|other| other.name != tool.name)));
            let foreign = foreign(session);
            assert!(next.iter().all(|tool| foreign.contains(&tool.name)));
            assert!(own.iter().all(|tool| !foreign.contains(&tool.name)));
        }
    }
}
