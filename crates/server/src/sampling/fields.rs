//! The fields of a JSON request that are read by name. A parameter can have several names, `null` counts as absent, and a whole
//! number may be written as `2.0`.

use crate::error::{ApiResult, ErrorResponse};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The names of one parameter in the APIs of different programs, the preferred one first.
pub(crate) type FieldNames = &'static [&'static str];

/// The fields of a request that no other type has read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct RequestFields(Map<String, Value>);

impl From<Map<String, Value>> for RequestFields {
    fn from(fields: Map<String, Value>) -> Self {
        Self(fields)
    }
}

impl RequestFields {
    /// The first of the names that has a value.
    pub fn find(&self, names: FieldNames) -> Option<(&'static str, &Value)> {
        let value = |&name: &&'static str| Some((name, self.0.get(name).filter(|value| !value.is_null())?));
        names.iter().find_map(value)
    }

    /// The value of a name, also where it is null.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    pub fn number(
        &self,
        names: FieldNames,
        range: RangeInclusive<f32>,
    ) -> ApiResult<Option<(&'static str, f32)>> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(name, value, "a number"))? as f32;
        if !range.contains(&number) {
            return Err(out_of_range(name, value, range.start(), range.end()));
        }
        Ok(Some((name, number)))
    }

    pub fn integer(
        &self,
        names: FieldNames,
        range: RangeInclusive<i64>,
    ) -> ApiResult<Option<(&'static str, i64)>> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        let number = whole_number(value).ok_or_else(|| wrong_type(name, value, "a whole number"))?;
        if !range.contains(&number) {
            return Err(match *range.end() {
                i64::MAX => ErrorResponse::invalid_parameter(
                    name,
                    format!("{name} is {value}; it must be at least {}", range.start()),
                ),
                _ => out_of_range(name, value, range.start(), range.end()),
            });
        }
        Ok(Some((name, number)))
    }

    pub fn boolean(&self, names: FieldNames) -> ApiResult<Option<(&'static str, bool)>> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        match value {
            Value::Bool(value) => Ok(Some((name, *value))),
            value => Err(wrong_type(name, value, "true or false")),
        }
    }

    pub fn text(&self, names: FieldNames) -> ApiResult<Option<(&'static str, &str)>> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        match value {
            Value::String(text) => Ok(Some((name, text))),
            value => Err(wrong_type(name, value, "a text")),
        }
    }

    /// A text or a list of texts. Empty ones are left out.
    pub fn texts(&self, names: FieldNames, max: usize) -> ApiResult<Option<(&'static str, Vec<String>)>> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        let texts: Option<Vec<&str>> = match value {
            Value::String(text) => Some(vec![text]),
            Value::Array(values) => {
                values.iter().filter(|value| !value.is_null()).map(Value::as_str).collect()
            }
            _ => None,
        };
        let texts = texts.ok_or_else(|| wrong_type(name, value, "a text or a list of texts"))?;
        let texts: Vec<String> =
            texts.into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect();
        if texts.len() > max {
            let message = format!("{name} has {} texts; at most {max} are allowed", texts.len());
            return Err(ErrorResponse::invalid_parameter(name, message));
        }
        Ok(Some((name, texts)))
    }
}

/// A number without a fraction, such as `2` or `2.0`.
pub(crate) fn whole_number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64().filter(|number| number.fract() == 0.0)?;
        (number.abs() < 9e15).then_some(number as i64)
    })
}

/// The value in an error: a long one is cut.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

pub(crate) fn wrong_type(name: &'static str, value: &Value, expected: &str) -> ErrorResponse {
    let message = format!("{name} is {}; it must be {expected}", shown(value));
    ErrorResponse::invalid_parameter(name, message).with_code("invalid_type")
}

fn out_of_range(
    name: &'static str,
    value: &Value,
    from: &impl std::fmt::Display,
    to: &impl std::fmt::Display,
) -> ErrorResponse {
    ErrorResponse::invalid_parameter(
        name,
        format!("{name} is {}; it must be from {from} to {to}", shown(value)),
    )
}
