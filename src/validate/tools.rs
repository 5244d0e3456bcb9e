//! The tools of a request: names and parameter schemas, compiled once and shared.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, OnceLock},
};

use jsonschema::Validator;
use serde_json::Value;

use super::json;
use crate::error::{Error, Result};

/// The `tools` array of a request. Clones share one compiled form.
#[derive(Clone, Default)]
pub struct Tools(Arc<Shared>);

#[derive(Default)]
struct Shared {
    values: Vec<Value>,
    compiled: OnceLock<Vec<Tool>>,
}

/// One declared function.
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its parameter schema, compiled for draft 2020-12; `None` where it has none or cannot be compiled.
    pub schema: Option<Validator>,
    /// Whether a call without arguments satisfies the schema.
    pub allows_empty: bool,
    fault: Option<String>,
}

impl Tools {
    /// The tools in `values`, in the shape of the request.
    pub fn new(values: Vec<Value>) -> Self {
        Self(Arc::new(Shared { values, compiled: OnceLock::new() }))
    }

    /// The array as the request carries it.
    pub fn values(&self) -> &[Value] {
        &self.0.values
    }

    /// Whether no tool is declared.
    pub fn is_empty(&self) -> bool {
        self.0.values.is_empty()
    }

    /// The declared functions, in order.
    pub fn compiled(&self) -> &[Tool] {
        self.0.compiled.get_or_init(|| self.0.values.iter().filter_map(Tool::compile).collect())
    }

    /// The declared function called `name`.
    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.compiled().iter().find(|tool| tool.name == name)
    }

    /// An error that names the first tool that is no function or whose schema cannot be compiled.
    pub fn check(&self) -> Result<()> {
        if let Some(index) = self.0.values.iter().position(|value| function_name(value).is_none()) {
            return Err(Error::usage(format!("tools[{index}] has no function name"))
                .hint("each tool is {\"type\": \"function\", \"function\": {\"name\": …, \"parameters\": …}}"));
        }
        match self.compiled().iter().find_map(|tool| Some((&tool.name, tool.fault.as_ref()?))) {
            None => Ok(()),
            Some((name, fault)) => Err(Error::usage(format!("the parameters of tool `{name}` are no schema: {fault}"))
                .hint("JSON Schema draft 2020-12 without remote references is read")),
        }
    }
}

/// The function object of a tool; tools may also come without the wrapper.
fn function(value: &Value) -> &Value {
    value.get("function").filter(|inner| inner.is_object()).unwrap_or(value)
}

fn function_name(value: &Value) -> Option<&str> {
    function(value).get("name")?.as_str()
}

impl Tool {
    fn compile(value: &Value) -> Option<Self> {
        let name = function_name(value)?.to_owned();
        let parameters = function(value).get("parameters").or_else(|| function(value).get("input_schema"));
        let (schema, fault) = match parameters.filter(|parameters| !parameters.is_null()) {
            None => (None, None),
            Some(parameters) => match jsonschema::draft202012::new(parameters) {
                Ok(schema) => (Some(schema), None),
                Err(error) => (None, Some(error.to_string())),
            },
        };
        let empty = Value::Object(serde_json::Map::new());
        let allows_empty = schema.as_ref().is_none_or(|schema| schema.is_valid(&empty));
        Some(Self { name, schema, allows_empty, fault })
    }

    /// The first way in which `arguments` breaks the schema.
    pub fn violation(&self, arguments: &Value) -> Option<String> {
        let schema = self.schema.as_ref()?;
        if schema.is_valid(arguments) {
            return None;
        }
        let error = schema.iter_errors(arguments).next()?;
        let place = error.instance_path().to_string();
        let place = if place.is_empty() { "the arguments".to_owned() } else { place };
        Some(format!("{place}: {error}"))
    }

    /// The first value that came as a string, where every failing value is a string that decodes to the right type.
    pub fn stringified(&self, arguments: &Value) -> Option<String> {
        const ROUNDS: usize = 4;
        let schema = self.schema.as_ref()?;
        if schema.is_valid(arguments) {
            return None;
        }
        let mut decoded = arguments.clone();
        let mut first = None;
        for _ in 0..ROUNDS {
            let failing: BTreeSet<String> =
                schema.iter_errors(&decoded).map(|error| error.instance_path().to_string()).collect();
            if failing.is_empty() {
                return first;
            }
            for path in failing {
                let place = decoded.pointer_mut(&path)?;
                let Value::String(text) = place else { return None };
                *place = decode(text)?;
                first.get_or_insert(path);
            }
        }
        schema.is_valid(&decoded).then_some(first).flatten()
    }
}

/// The value inside a string, also in Python's spelling.
fn decode(text: &str) -> Option<Value> {
    match text.trim() {
        "True" | "TRUE" => Some(Value::Bool(true)),
        "False" | "FALSE" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        text => json::strict(text),
    }
}

impl fmt::Debug for Tools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0.values).finish()
    }
}

impl From<Vec<Value>> for Tools {
    fn from(values: Vec<Value>) -> Self {
        Self::new(values)
    }
}
