//! A server that speaks as OpenAI does, as a script plays it.

mod stub;

use halo_core::attention::Watch;
use halo_core::seams::{
    Finish, Flow, Form, Message, Model, ModelStep, Prompt, Sampling, SeamError, Template,
};
use halo_core::token::{Position, Role};
use halo_remote::{Options, Remote, cut, may_carry_key};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;
use stub::{Asked, Reply, Stub};

const CHAT: &str = "/v1/chat/completions";

fn server(models: Value, script: impl Fn(&Asked, &mut Reply) + Send + Sync + 'static) -> Stub {
    Stub::new(move |asked, reply| match asked.path.as_str() {
        "/v1/models" if models.is_null() => reply.not_found(),
        "/v1/models" => reply.json(&models),
        CHAT => script(asked, reply),
        _ => reply.not_found(),
    })
}

fn one_model() -> Value {
    json!({"data": [{"id": "other", "context_length": 1}, {"id": "m/1", "max_model_len": 32768}]})
}

fn connect(stub: &Stub) -> Remote {
    let address = format!("openai+http://127.0.0.1:{}/v1#m/1", stub.port);
    Remote::connect(&address, &Options::default()).unwrap()
}

fn delta(text: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
}

fn end(reason: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

/// An answer of those deltas, ended with that reason.
fn says(deltas: &'static [&'static str], reason: &'static str) -> Stub {
    server(one_model(), move |_, reply| {
        reply.begin();
        for text in deltas {
            reply.event(&delta(text));
        }
        reply.event(&end(reason));
        reply.raw("data: [DONE]\n\n");
    })
}

fn generate(
    model: &mut Remote,
    sampling: &Sampling,
    last: &str,
    mut stop: impl FnMut(usize, usize) -> bool,
) -> (Vec<String>, Result<Finish, SeamError>) {
    let messages = || {
        let message = |role, text: &str| Message { role, text: text.into() };
        vec![message(Role::System, "Be brief."), message(Role::User, "Hi"), message(Role::Assistant, last)]
    };
    let prompt =
        Prompt { conversation: "c", window: &[], messages: &messages, next: Position(0), aside: false };
    let (mut told, mut readings) = (Vec::new(), 0);
    let finish = model.generate(&prompt, sampling, &Watch::default(), &mut |step| {
        match step {
            ModelStep::Token(piece, look) => {
                assert!(look.is_none());
                assert_eq!(cut(&piece.text)[0].id, piece.id, "the same text, the same number");
                told.push(piece.text.clone());
            }
            _ => readings += 1,
        }
        if stop(told.len(), readings) { Flow::Stop } else { Flow::Continue }
    });
    (told, finish)
}

fn whole(stub: &Stub, sampling: &Sampling) -> (String, Result<Finish, SeamError>) {
    let (told, finish) = generate(&mut connect(stub), sampling, "", |_, _| false);
    (told.concat(), finish)
}

#[test]
fn an_answer_is_cut_into_pieces() {
    let stub = says(&["Hel", "lo wor", "ld, it is 😀", " 20", "24"], "stop");
    let mut model = connect(&stub);
    let info = model.info().clone();
    assert_eq!((info.name.as_str(), info.context, info.attention), ("m/1", 32768, false));
    assert_eq!(info.template, Template::default());
    let (told, finish) = generate(&mut model, &Sampling::default(), "", |_, _| false);
    assert_eq!(finish, Ok(Finish::End));
    assert_eq!(told, ["Hello", " world", ",", " it", " is", " 😀", " ", "202", "4"]);
    let pieces = model.tokenize("Hello world, it is 😀 2024", false).unwrap();
    assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<Vec<_>>(), told);
}

#[test]
fn the_request_is_as_openai_wants_it() {
    let stub = says(&["x"], "stop");
    let mut model = connect(&stub);
    let sampling = Sampling {
        stop: ["a", "", "b", "c", "d", "e"].map(str::to_owned).to_vec(),
        form: Some(Form::Schema("{\"type\": \"object\"}".into())),
        temperature: 0.5,
        seed: u64::MAX,
        ..Sampling::default()
    };
    generate(&mut model, &sampling, "", |_, _| false).1.unwrap();
    generate(&mut model, &Sampling::default(), "So", |_, _| false).1.unwrap();
    let asked = stub.asked(CHAT);
    let body = &asked[0].body;
    assert_eq!((&body["model"], &body["stream"]), (&json!("m/1"), &json!(true)));
    assert_eq!((&body["max_tokens"], &body["temperature"]), (&json!(50), &json!(0.5)));
    assert_eq!(body["seed"], json!(i64::MAX));
    assert_eq!(body["stop"], json!(["a", "b", "c", "d"]), "more than four are refused");
    assert_eq!(body["response_format"]["type"], json!("json_schema"));
    assert_eq!(body["response_format"]["json_schema"]["schema"], json!({"type": "object"}));
    assert_eq!(body.get("top_k"), None);
    let begun = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    assert_eq!(body["messages"], begun, "an answer that has not begun is no message");
    let body = &asked[1].body;
    assert_eq!(
        body["messages"][2],
        json!({"role": "assistant", "content": "So"}),
        "one that has is gone on with"
    );
    assert_eq!((body.get("stop"), body.get("response_format")), (None, None));

    let broken = Sampling { form: Some(Form::Schema("{".into())), ..Sampling::default() };
    let error = generate(&mut model, &broken, "", |_, _| false).1.unwrap_err();
    assert!(error.why.contains("no JSON"), "{error}");
}

#[test]
fn ends_are_what_they_are() {
    let stops = |stops: &[&str]| Sampling {
        stop: stops.iter().map(|s| (*s).to_owned()).collect(),
        ..Sampling::default()
    };
    let five = stops(&["1", "2", "3", "4", "</tool>"]);
    let cases = [
        (says(&["a b"], "length"), Sampling::default(), "a b", Finish::Length),
        (says(&["a b"], "content_filter"), Sampling::default(), "a b", Finish::End),
        // The fifth is not sent, and is enforced all the same.
        (says(&["a</to", "ol> and more"], "stop"), five, "a</tool>", Finish::Stop),
        (
            says(&["a b c d"], "stop"),
            Sampling { max_tokens: 2, ..Sampling::default() },
            "a b",
            Finish::Length,
        ),
        (says(&["a b"], "stop"), Sampling { max_tokens: 2, ..Sampling::default() }, "a b", Finish::End),
    ];
    for (stub, sampling, text, finish) in cases {
        assert_eq!(whole(&stub, &sampling), (text.to_owned(), Ok(finish)));
    }
    // A server that says which stop sequence it has cut off gets it put back.
    let stub = server(one_model(), |_, reply| {
        reply.begin();
        reply.event(&delta("a"));
        let mut end = end("stop");
        end["choices"][0]["stop_reason"] = json!("</tool>");
        reply.event(&end);
    });
    assert_eq!(whole(&stub, &stops(&["</tool>"])), ("a</tool>".to_owned(), Ok(Finish::Stop)));
    assert_eq!(whole(&stub, &stops(&["x"])), ("a".to_owned(), Ok(Finish::End)));
}

#[test]
fn characters_may_be_cut_anywhere() {
    let stub = server(one_model(), |_, reply| {
        reply.begin();
        let event = format!("data: {}\r\n\r\n", delta("é 😀 谢"));
        for byte in event.as_bytes().chunks(1) {
            reply.raw(byte);
        }
        reply.event(&end("stop"));
    });
    let (told, finish) = whole(&stub, &Sampling::default());
    assert_eq!((told.as_str(), finish), ("é 😀 谢", Ok(Finish::End)));
}

#[test]
fn a_listener_can_stop_it() {
    let stub = server(one_model(), |_, reply| {
        reply.begin();
        reply.event(&delta("a b c"));
        reply.wait_for_close();
    });
    let (told, finish) = generate(&mut connect(&stub), &Sampling::default(), "", |told, _| told == 2);
    assert_eq!((told.concat().as_str(), finish), ("a b", Ok(Finish::Aborted)));
    assert!(stub.saw_close());
    let stub = server(one_model(), |_, reply| reply.wait_for_close());
    let (told, finish) = generate(&mut connect(&stub), &Sampling::default(), "", |_, readings| readings == 2);
    assert_eq!((told.len(), finish), (0, Ok(Finish::Aborted)));
    assert!(stub.saw_close());
}

#[test]
fn what_goes_wrong_is_said() {
    type Answer = fn(&mut Reply);
    let cases: [(Answer, &str, &str); 5] = [
        (
            |r| {
                r.begin();
                r.event(&delta("a b"));
            },
            "a b",
            "before the answer did",
        ),
        (
            |r| {
                r.begin();
                r.event(&delta("a b"));
                r.event(&json!({"error": {"message": "overloaded"}}));
            },
            "a",
            "broke off: overloaded",
        ),
        (
            |r| r.answer("401 Unauthorized", "", "{\"error\": {\"message\": \"No key\"}}"),
            "",
            "401: No key; check the key",
        ),
        (
            |r| r.answer("404 Not Found", "", "{\"error\": {\"message\": \"no such model\"}}"),
            "",
            "no such model; check the address, and the model's name",
        ),
        (|r| r.answer("200 OK", "content-type: text/html\r\n", "<html>"), "", "text/html came: <html>"),
    ];
    for (answer, text, expected) in cases {
        let stub = server(one_model(), move |_, reply| answer(reply));
        let (told, finish) = whole(&stub, &Sampling::default());
        let error = finish.unwrap_err().to_string();
        assert!(told == text && error.contains(expected), "{told:?} {error}");
    }
}

#[test]
fn the_context_is_told_or_chosen() {
    let context = |models: Value, options: &Options| {
        let stub = server(models, |_, _| {});
        let address = format!("openai+http://127.0.0.1:{}/v1/#m", stub.port);
        Remote::connect(&address, options).unwrap().info().context
    };
    let (usual, chosen) = (Options::default(), Options { context: Some(100), ..Options::default() });
    let cases = [
        (json!({"data": [{"id": "m", "context_length": 1000}]}), 1000),
        (json!({"data": [{"id": "m", "context_window": 2000}]}), 2000),
        (json!({"data": [{"id": "m"}]}), 8192),
        (json!({"data": [{"id": "x", "context_length": 1000}]}), 8192),
        (Value::Null, 8192),
    ];
    for (models, expected) in cases {
        assert_eq!(context(models.clone(), &usual), expected, "{models}");
        assert_eq!(context(models, &chosen), 100);
    }
}

#[test]
fn a_model_must_be_named_unless_there_is_one() {
    let connect = |models: Value| {
        let stub = server(models, |_, _| {});
        Remote::connect(&format!("openai+http://127.0.0.1:{}/v1", stub.port), &Options::default())
    };
    let only = connect(json!({"data": [{"id": "only"}]})).unwrap();
    assert_eq!(only.info().name, "only");
    let error = connect(one_model()).unwrap_err();
    assert!(error.why.contains("the server has other, m/1"), "{error}");
    assert!(connect(Value::Null).unwrap_err().why.contains("behind a #"));
}

#[test]
fn a_key_is_sent_only_where_nobody_can_read_it() {
    for (https, host, may) in [
        (true, "api.example.org", true),
        (true, "192.0.2.1", true),
        (false, "localhost", true),
        (false, "LOCALHOST", true),
        (false, "127.0.0.1", true),
        (false, "127.1.2.3", true),
        (false, "::1", true),
        (false, "[::1]", true),
        (false, "192.168.1.5", false),
        (false, "0.0.0.0", false),
        (false, "localhost.example.org", false),
        (false, "127.0.0.1.example.org", false),
        (false, "api.example.org", false),
        (false, "", false),
    ] {
        assert_eq!(may_carry_key(https, host), may, "{https} {host}");
    }
}

/// The environment cannot be changed within a program that runs, so this test runs itself with another one.
#[test]
fn a_key_comes_from_the_environment_and_is_never_shown() {
    const KEY: &str = "sk-secret-0123456789";
    if let Ok(port) = std::env::var("HALO_TEST_PORT") {
        let error =
            Remote::connect("openai+http://192.0.2.1:9/v1#m", &Options::default()).unwrap_err().to_string();
        assert!(error.contains("use https") && !error.contains("secret"), "{error}");
        let address = format!("openai+http://localhost:{port}/v1#m/1");
        let mut model = Remote::connect(&address, &Options::default()).unwrap();
        let error = generate(&mut model, &Sampling::default(), "", |_, _| false).1.unwrap_err().to_string();
        assert!(error.contains("no such key: …") && !error.contains("secret"), "{error}");
        assert!(!format!("{model:?} {:?}", halo_remote::key_from_environment()).contains("secret"));
        return;
    }
    let stub = server(one_model(), |_, reply| {
        reply.answer(
            "401 Unauthorized",
            "",
            &format!("{{\"error\": {{\"message\": \"no such key: {KEY}\"}}}}"),
        );
    });
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_key_comes_from_the_environment_and_is_never_shown"])
        .env("HALO_TEST_PORT", stub.port.to_string())
        .env("HALO_OPENAI_KEY", KEY)
        .env("OPENAI_API_KEY", "another")
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(stub.asked(CHAT)[0].header("authorization"), format!("Bearer {KEY}"));
    assert_eq!(stub.asked("/v1/models")[0].header("authorization"), format!("Bearer {KEY}"));
}

#[test]
fn a_server_that_is_slow_to_name_its_models_is_given_up() {
    let stub = Stub::new(|_, reply| reply.wait_for_close());
    let options = Options { quick: Duration::from_millis(200), ..Options::default() };
    let error =
        Remote::connect(&format!("openai+http://127.0.0.1:{}/v1#m", stub.port), &options).unwrap_err();
    assert!(error.why.contains("no answer within 0.2 s"), "{error}");
    assert!(stub.saw_close());
}
