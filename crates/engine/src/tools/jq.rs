//! jq over a document, for an untrusted caller: a language model.
//!
//! Every filter is checked before it runs: no definitions, no recursion, no loops, no access outside of the document, and
//! only filters of an allow-list. The check cannot bound time and memory (a few harmless steps can multiply without end), so
//! the filter runs in a process of its own with limits on both ([`JqRunner`]).

use jaq_core::load::lex::StrPart;
use jaq_core::load::parse::{BinaryOp, Def, Term};
use jaq_core::load::{Arena, File, Loader, parse};
use jaq_core::path::{Part, Path};
use jaq_core::{Compiler, Ctx, Vars, data, ops, unwrap_valr};
use jaq_json::Val;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest filter, in bytes.
const MAX_FILTER_BYTES: usize = 4000;
/// The largest document, and the most that comes out, in bytes.
pub const MAX_DOCUMENT_BYTES: usize = 256 * 1024;
/// The most that a filter reads, in bytes: documents that are too large already can still be made smaller.
const MAX_JOB_BYTES: usize = 8 << 20;
const MAX_RESULTS: usize = 100;
/// The longest run time of a filter.
const TIMEOUT: Duration = Duration::from_secs(1);
/// The deepest nesting of a filter.
const MAX_NESTING: usize = 100;

/// The filters that may be called: they terminate, and use nothing but the document.
const ALLOWED_FILTERS: &[&str] = &[
    "abs",
    "add",
    "all",
    "any",
    "arrays",
    "ascii_downcase",
    "ascii_upcase",
    "booleans",
    "ceil",
    "contains",
    "del",
    "empty",
    "endswith",
    "error",
    "false",
    "first",
    "flatten",
    "floor",
    "from_entries",
    "getpath",
    "group_by",
    "has",
    "in",
    "index",
    "indices",
    "inside",
    "isvalid",
    "iterables",
    "join",
    "keys",
    "keys_unsorted",
    "last",
    "length",
    "ltrimstr",
    "map",
    "map_values",
    "max",
    "max_by",
    "min",
    "min_by",
    "not",
    "null",
    "nulls",
    "numbers",
    "objects",
    "path",
    "paths",
    "reverse",
    "rindex",
    "round",
    "rtrimstr",
    "scalars",
    "select",
    "setpath",
    "sort",
    "sort_by",
    "split",
    "sqrt",
    "startswith",
    "strings",
    "to_entries",
    "tojson",
    "fromjson",
    "tonumber",
    "tostring",
    "trim",
    "ltrim",
    "rtrim",
    "true",
    "type",
    "unique",
    "unique_by",
    "utf8bytelength",
    "values",
    "with_entries",
    "delpaths",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JqRunner {
    /// In this process: for tests and trusted filters only.
    InProcess,
    /// In a process of its own: this program with [`SUBPROCESS_ARG`].
    Subprocess(PathBuf),
}

/// The argument with which this program runs one filter from standard input and exits.
pub const SUBPROCESS_ARG: &str = "__jq";

impl JqRunner {
    /// The results of a filter on a document.
    pub fn run(&self, filter: &str, document: &Value) -> Result<Vec<Value>, String> {
        if filter.len() > MAX_FILTER_BYTES {
            return Err(format!("the filter is longer than {MAX_FILTER_BYTES} characters"));
        }
        match self {
            JqRunner::InProcess => evaluate(filter, document),
            JqRunner::Subprocess(program) => run_in_subprocess(program, filter, document),
        }
    }
}

/// Runs a filter in a process of its own.
fn run_in_subprocess(program: &PathBuf, filter: &str, document: &Value) -> Result<Vec<Value>, String> {
    let failed = |error: std::io::Error| format!("it could not be run: {error}");
    let job = json!({ "filter": filter, "document": document }).to_string();
    if job.len() > MAX_JOB_BYTES {
        let limit = MAX_JOB_BYTES >> 20;
        return Err(format!(
            "the file is larger than the {limit} MiB that jq reads; patch can replace parts of it"
        ));
    }
    let mut command = Command::new(program);
    command.arg(SUBPROCESS_ARG).env_clear();
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map_err(failed)?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let reader = std::thread::spawn(move || {
        let mut answer = Vec::new();
        if let Some(output) = output {
            let _ = output.take(2 * MAX_DOCUMENT_BYTES as u64).read_to_end(&mut answer);
        }
        answer
    });
    // A child that does not read, or exits early, is recognized by its output.
    let writer = std::thread::spawn(move || input.map(|mut input| input.write_all(job.as_bytes())));
    let begin = Instant::now();
    let ended = loop {
        match child.try_wait().map_err(failed)? {
            Some(_) => break true,
            None if begin.elapsed() > TIMEOUT => break false,
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    if !ended {
        let _ = child.kill();
        let _ = child.wait();
    }
    let _ = writer.join();
    let answer = reader.join().unwrap_or_default();
    if !ended {
        return Err("it takes too long: write something simpler".into());
    }
    let answer: Value = serde_json::from_slice(&answer)
        .map_err(|_| "it needs too much memory: write something simpler".to_owned())?;
    match (&answer["results"], answer["error"].as_str()) {
        (Value::Array(results), _) => Ok(results.clone()),
        (_, error) => Err(error.unwrap_or("it failed").to_owned()),
    }
}

/// The subprocess: reads one job, and writes its result.
pub fn serve_subprocess(input: &mut dyn Read, output: &mut dyn Write) -> std::io::Result<()> {
    let mut job = Vec::new();
    input.take(MAX_JOB_BYTES as u64).read_to_end(&mut job)?;
    let job: Value = serde_json::from_slice(&job).unwrap_or_default();
    let answer = match evaluate(job["filter"].as_str().unwrap_or_default(), &job["document"]) {
        Ok(results) => json!({ "results": results }),
        Err(error) => json!({ "error": error }),
    };
    output.write_all(answer.to_string().as_bytes())?;
    output.flush()
}

/// The results of a filter on a document, in this process.
fn evaluate(filter: &str, document: &Value) -> Result<Vec<Value>, String> {
    if bracket_depth(filter) > MAX_NESTING {
        return Err("it nests too deep".into());
    }
    let term = parse(filter, |parser| parser.term()).ok_or("this is no jq filter")?;
    check_allowed(&term, MAX_NESTING)?;
    let mut document = document.clone();
    for path in assigned_paths(&term) {
        create_parents(&mut document, &path);
    }
    let funs = || jaq_core::funs::<JqData>().chain(jaq_std::base_funs()).chain(jaq_json::funs());
    let native: BTreeSet<JqSignature<'_>> = funs().map(|fun| (fun.0, fun.1.len())).collect();
    let defs = jaq_core::defs().chain(jaq_std::defs()).chain(jaq_json::defs());
    let defs = resolvable_defs(defs.collect(), &native);
    let arena = Arena::default();
    let modules = Loader::new(defs)
        .load(&arena, File { code: filter, path: () })
        .map_err(|_| "this is no jq filter")?;
    let compiled = Compiler::default().with_funs(funs()).compile(modules);
    let compiled = compiled.map_err(|_| "it calls something that is not there, or with other arguments")?;
    let input =
        jaq_json::read::parse_single(document.to_string().as_bytes()).map_err(|error| error.to_string())?;
    let context = Ctx::<JqData>::new(&compiled.lut, Vars::new([]));
    let (mut results, mut size) = (Vec::new(), 0);
    for result in compiled.id.run((context, input)).map(unwrap_valr) {
        let text = result.map_err(|error| error.to_string())?.to_string();
        size += text.len();
        if size > MAX_DOCUMENT_BYTES || results.len() == MAX_RESULTS {
            return Err(format!(
                "more comes out than {MAX_RESULTS} results or {} KiB",
                MAX_DOCUMENT_BYTES / 1024
            ));
        }
        results
            .push(serde_json::from_str(&text).map_err(|_| "what comes out is no JSON, or nested too deep")?);
    }
    Ok(results)
}

type JqData = data::JustLut<Val>;

/// The deepest nesting of brackets, including those in strings.
fn bracket_depth(filter: &str) -> usize {
    let (mut deep, mut deepest) = (0usize, 0);
    for c in filter.chars() {
        match c {
            '(' | '[' | '{' => deep += 1,
            ')' | ']' | '}' => deep = deep.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(deep);
    }
    deepest
}

/// The name of a filter and its number of arguments.
type JqSignature<'a> = (&'a str, usize);

/// The definitions of the library that need only each other and native filters: it has more than are compiled here.
fn resolvable_defs<'a>(mut defs: Vec<Def<&'a str>>, native: &BTreeSet<JqSignature<'_>>) -> Vec<Def<&'a str>> {
    loop {
        let known = defs.iter().map(|def| (def.name, def.args.len()));
        let known: BTreeSet<JqSignature<'_>> = known.chain(native.iter().copied()).collect();
        let before = defs.len();
        defs.retain(|def| {
            let mut called = Vec::new();
            collect_external_calls(def, &mut called);
            called.iter().all(|name| known.contains(name))
        });
        if defs.len() == before {
            return defs;
        }
    }
}

/// The filters that a definition calls, without itself and its arguments.
fn collect_external_calls<'a>(def: &Def<&'a str>, called: &mut Vec<JqSignature<'a>>) {
    let mut inner = Vec::new();
    collect_calls(&def.body, &mut inner);
    let own = |name: &JqSignature<'_>| {
        *name == (def.name, def.args.len())
            || def.args.iter().any(|arg| (arg.trim_start_matches('$'), 0) == *name)
    };
    called.extend(inner.into_iter().filter(|name| !own(name)));
}

/// The filters that a filter calls and does not define.
fn collect_calls<'a>(term: &Term<&'a str>, called: &mut Vec<JqSignature<'a>>) {
    for_each_child(term, &mut |inner| collect_calls(inner, called));
    match term {
        Term::Call(name, arguments) => called.push((name, arguments.len())),
        Term::Def(defs, _) => {
            defs.iter().for_each(|def| collect_external_calls(def, called));
            called.retain(|name| !defs.iter().any(|def| (def.name, def.args.len()) == *name));
        }
        _ => {}
    }
}

/// The parts of a filter, without its definitions.
fn for_each_child<'t, 'a>(term: &'t Term<&'a str>, tell: &mut dyn FnMut(&'t Term<&'a str>)) {
    match term {
        Term::Id | Term::Recurse | Term::Num(_) | Term::Break(_) | Term::Var(_) => {}
        Term::Str(_, parts) => parts.iter().for_each(|part| {
            if let StrPart::Term(term) = part {
                tell(term);
            }
        }),
        Term::Arr(inner) => inner.iter().for_each(|term| tell(term)),
        Term::Obj(entries) => entries.iter().for_each(|(key, value)| {
            tell(key);
            value.iter().for_each(&mut *tell);
        }),
        Term::Neg(inner) | Term::Label(_, inner) | Term::Def(_, inner) => tell(inner),
        Term::BinOp(left, _, right) => [left, right].into_iter().for_each(|term| tell(term)),
        Term::Fold(_, inner, _, arguments) => {
            tell(inner);
            arguments.iter().for_each(tell);
        }
        Term::TryCatch(inner, other) => {
            tell(inner);
            other.iter().for_each(|term| tell(term));
        }
        Term::IfThenElse(branches, other) => {
            branches.iter().for_each(|(condition, then)| [condition, then].into_iter().for_each(&mut *tell));
            other.iter().for_each(|term| tell(term));
        }
        Term::Call(_, arguments) => arguments.iter().for_each(tell),
        Term::Path(inner, Path(parts)) => {
            tell(inner);
            parts.iter().for_each(|(part, _)| match part {
                Part::Index(index) => tell(index),
                Part::Range(from, to) => from.iter().chain(to).for_each(&mut *tell),
            });
        }
    }
}

/// Checks whether a filter may run; the error names the part that may not.
fn check_allowed(term: &Term<&str>, deep: usize) -> Result<(), String> {
    let Some(deep) = deep.checked_sub(1) else { return Err("it nests too deep".into()) };
    match term {
        Term::Recurse => return Err(".. is not allowed here".into()),
        Term::Label(..) | Term::Break(_) => return Err("label and break are not allowed here".into()),
        Term::Fold(name, ..) => return Err(format!("{name} is not allowed here")),
        Term::Def(..) => return Err("def is not allowed here".into()),
        Term::Var(name) => return Err(format!("{name} is not there")),
        Term::Str(Some(format), _) => return Err(format!("{format} is not allowed here")),
        Term::Call(name, _) if !ALLOWED_FILTERS.contains(name) => return Err(format!("{name} is not there")),
        Term::BinOp(_, BinaryOp::Pipe(Some(_)), _) => return Err("variables are not allowed here".into()),
        // A string times a number repeats the string.
        Term::BinOp(_, BinaryOp::Math(ops::Math::Mul) | BinaryOp::UpdateMath(ops::Math::Mul), _) => {
            return Err("* is not allowed here".into());
        }
        _ => {}
    }
    let mut inside = Ok(());
    for_each_child(term, &mut |inner| {
        if inside.is_ok() {
            inside = check_allowed(inner, deep);
        }
    });
    inside
}

/// A step of a literal path.
#[derive(Clone, Debug, PartialEq, Eq)]
enum JqPathStep {
    Key(String),
    Index(usize),
}

/// The literal paths that a filter assigns to: jq creates what is missing along them.
fn assigned_paths(term: &Term<&str>) -> Vec<Vec<JqPathStep>> {
    match term {
        Term::BinOp(left, BinaryOp::Pipe(None) | BinaryOp::Comma, right) => {
            [assigned_paths(left), assigned_paths(right)].concat()
        }
        Term::BinOp(
            left,
            BinaryOp::Assign | BinaryOp::Update | BinaryOp::UpdateMath(_) | BinaryOp::UpdateAlt,
            _,
        ) => literal_path(left).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn literal_path(term: &Term<&str>) -> Option<Vec<JqPathStep>> {
    match term {
        Term::Id => Some(Vec::new()),
        Term::Path(inner, Path(parts)) => {
            let mut all = literal_path(inner)?;
            for (part, _) in parts {
                all.push(match part {
                    Part::Index(Term::Str(None, text)) => {
                        let mut key = String::new();
                        for part in text {
                            match part {
                                StrPart::Str(text) => key.push_str(text),
                                StrPart::Char(c) => key.push(*c),
                                StrPart::Term(_) => return None,
                            }
                        }
                        JqPathStep::Key(key)
                    }
                    Part::Index(Term::Num(number)) => JqPathStep::Index(number.parse().ok()?),
                    _ => return None,
                });
            }
            Some(all)
        }
        _ => None,
    }
}

/// The most items that an assignment adds to a list.
const MAX_ARRAY_GROWTH: usize = 1000;

/// Creates what is missing along a path; lists are filled with null.
fn create_parents(document: &mut Value, path: &[JqPathStep]) {
    let mut place = document;
    for step in path {
        if place.is_null() {
            *place = match step {
                JqPathStep::Key(_) => json!({}),
                JqPathStep::Index(_) => json!([]),
            };
        }
        place = match (place, step) {
            (Value::Object(map), JqPathStep::Key(key)) => map.entry(key.clone()).or_insert(Value::Null),
            (Value::Array(all), JqPathStep::Index(index)) if *index < all.len() + MAX_ARRAY_GROWTH => {
                if all.len() <= *index {
                    all.resize(index + 1, Value::Null);
                }
                &mut all[*index]
            }
            // Running the filter reports its error.
            _ => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(filter: &str, document: &Value) -> Result<Vec<Value>, String> {
        JqRunner::InProcess.run(filter, document)
    }

    #[test]
    fn jq_reads_and_writes_notes() {
        let notes = json!({"topics": {"rust": ["a", "b"]}, "n": 3, "flag": false, "list": [1, 2, 3]});
        let cases = [
            (".", notes.clone()),
            (".topics.rust[0]", json!("a")),
            (".topics.rust[-1]", json!("b")),
            (".missing", json!(null)),
            (".n + 1", json!(4)),
            ("[.list[] | select(. > 1)]", json!([2, 3])),
            (".list | length", json!(3)),
            (".topics | keys", json!(["rust"])),
            ("del(.topics, .list, .flag)", json!({"n": 3})),
            ("{n, more: \"x\\(.n)\"}", json!({"n": 3, "more": "x3"})),
            ("if .flag then 1 else 2 end", json!(2)),
            (".list |= map(. + 1) | .list", json!([2, 3, 4])),
            (".list += [4] | .list", json!([1, 2, 3, 4])),
            ("(.a.b.c = 5) | .a", json!({"b": {"c": 5}})),
            (".a[2].x = 1 | .a", json!([null, null, {"x": 1}])),
            (".topics.go.v += 1 | .topics.go", json!({"v": 1})),
            (". + {\"z\": 1} | .z", json!(1)),
            (".n // 7", json!(3)),
            (".none // 7", json!(7)),
            (".topics | to_entries[0].key", json!("rust")),
        ];
        for (filter, expected) in cases {
            assert_eq!(run(filter, &notes), Ok(vec![expected]), "{filter}");
        }
    }

    #[test]
    fn jq_rejects_unsafe_filters() {
        let notes = json!({"s": "ab", "list": [1, 2], "flag": true});
        for filter in [
            "def f: f; f",
            "..",
            "recurse",
            "repeat(1)",
            "range(1000000000)",
            "while(true; .)",
            "until(false; .)",
            "env",
            "$ENV",
            "input",
            "inputs",
            "now",
            "halt",
            "debug",
            "stderr",
            "reduce .list[] as $x (0; . + $x)",
            "foreach .list[] as $x (0; .)",
            "label $f | break $f",
            ".s * 1000000000",
            "limit(3; repeat(1))",
            "@sh \"x\"",
            ". as $x | $x",
            "import \"a\" as a; .",
            "include \"a\"; .",
            "input_filename",
            "$__loc__",
            "getpath(paths(..))",
            "splits(\"a\")",
            "test(\"(a*)*b\")",
            "ltrimstr",
            "",
            "}{",
            "\u{0}",
            "'",
            ".flag.x = 1",
        ] {
            let error = run(filter, &notes).expect_err(filter);
            assert!(!error.is_empty() && error.len() < 300, "{filter}: {error}");
        }
        let deep = format!("{}1{}", "[".repeat(3000), "]".repeat(3000));
        assert!(run(&deep, &notes).is_err(), "the filter is too long");
        let deep = format!("{}1{}", "(".repeat(1500), ")".repeat(1500));
        assert!(run(&deep, &notes).is_err());
        let many = format!("[{}]", vec!["."; 500].join(","));
        assert!(run(&many, &notes).is_err() || run(&many, &notes).is_ok_and(|all| all.len() == 1));
    }

    #[test]
    fn jq_subprocess_serves_one_job() {
        let mut answer = Vec::new();
        let job = json!({"filter": ".a", "document": {"a": [1]}}).to_string();
        serve_subprocess(&mut job.as_bytes(), &mut answer).expect("written");
        assert_eq!(answer, br#"{"results":[[1]]}"#);
        let mut answer = Vec::new();
        serve_subprocess(&mut &b"nonsense"[..], &mut answer).expect("written");
        assert_eq!(answer, br#"{"error":"this is no jq filter"}"#);
    }
}
