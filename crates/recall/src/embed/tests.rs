//! The thread and its queue, with a model that does as it is told.

use super::worker::Encode;
use super::*;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender};

/// A model whose tokens are a text's bytes, and whose vectors are their sum and number. Each batch says that it begins,
/// and goes on when it may.
struct Fake {
    begun: SyncSender<usize>,
    may: Arc<Mutex<Receiver<()>>>,
    info: EmbedderInfo,
}

impl Encode for Fake {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn together(&self) -> bool {
        true
    }

    fn tokenize(&self, text: &str) -> Vec<i32> {
        text.bytes().map(i32::from).collect()
    }

    fn encode(&self, texts: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, SeamError> {
        let _ = self.begun.send(texts[0].len());
        let _ = self.may.lock().expect("whole").recv();
        match texts[0].len() {
            13 => panic!("thirteen"),
            12 => Err(SeamError::new("running the embedder", "twelve")),
            _ => Ok(texts
                .iter()
                .map(|text| vec![text.iter().sum::<i32>() as f32, text.len() as f32])
                .collect()),
        }
    }
}

/// A handle to fakes, and what holds them: which batches begin, and leave to go on.
fn fake(mut fails: usize) -> (Embeddings, Receiver<usize>, SyncSender<()>) {
    let (begun, begins) = sync_channel(1000);
    let (go, may) = sync_channel(1000);
    let may = Arc::new(Mutex::new(may));
    let load = move || -> Result<Box<dyn Encode>, SeamError> {
        if fails > 0 {
            fails -= 1;
            return Err(SeamError::new("loading the embedder", "not yet"));
        }
        let info =
            EmbedderInfo { name: "fake".into(), dimensions: 2, max_tokens: 99, ..EmbedderInfo::default() };
        Ok(Box::new(Fake { begun: begun.clone(), may: Arc::clone(&may), info }))
    };
    (Embeddings::start(Box::new(load)).expect("started"), begins, go)
}

/// Lets everything go on.
fn free(go: &SyncSender<()>) {
    (0..900).for_each(|_| go.send(()).expect("there is room"));
}

fn texts(lengths: &[usize]) -> Vec<String> {
    lengths.iter().map(|&length| "a".repeat(length)).collect()
}

fn one(length: usize) -> Vec<f32> {
    vec![97.0 * length as f32, length as f32]
}

#[test]
fn vectors_come_in_the_order_of_their_texts() {
    let (mut embeddings, _begins, go) = fake(0);
    free(&go);
    let texts = texts(&[5, 3, 0, 5, 4]);
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert_eq!(embeddings.embed(&texts), Ok([5, 3, 0, 5, 4].map(one).into()));
    assert_eq!(embeddings.embed(&[]), Ok(vec![]));
    assert_eq!(embeddings.info().map(|info| info.name), Ok("fake".into()));
}

#[test]
fn who_waits_comes_first() {
    let (embeddings, begins, go) = fake(0);
    let behind = |mut embeddings: Embeddings, lengths: &'static [usize]| {
        std::thread::spawn(move || {
            let mut told = Vec::new();
            let mut listen = |number: usize, vector: Vec<f32>| {
                told.push((number, vector));
                Flow::Continue
            };
            embeddings.embed_behind(texts(lengths), &mut listen).map(|()| told)
        })
    };
    let first = behind(embeddings.clone(), &[3, 1, 2, 3]);
    assert_eq!(begins.recv(), Ok(1), "the shortest of the work behind is under way");
    let second = behind(embeddings.clone(), &[9]);
    let (done, wait) = sync_channel(1);
    embeddings.send(Job::Embed { texts: texts(&[7, 6]), done }).expect("there");
    free(&go);
    assert_eq!(wait.recv().expect("answered"), Ok(vec![one(7), one(6)]));
    let told = first.join().expect("no panic").expect("no error");
    assert_eq!(told, [(1, one(1)), (2, one(2)), (0, one(3)), (3, one(3))]);
    assert_eq!(second.join().expect("no panic"), Ok(vec![(0, one(9))]));
    assert_eq!(begins.try_iter().collect::<Vec<_>>(), [6, 7, 2, 3, 9], "in this order, equals together");
}

#[test]
fn what_can_wait_can_be_stopped() {
    let (mut embeddings, begins, go) = fake(0);
    (0..3).for_each(|_| go.send(()).expect("there is room"));
    let mut told = 0;
    let lengths: Vec<usize> = (20..90).collect();
    let mut listen = |_, _| {
        told += 1;
        if told == 3 { Flow::Stop } else { Flow::Continue }
    };
    assert_eq!(embeddings.embed_behind(texts(&lengths), &mut listen), Ok(()));
    assert_eq!(told, 3, "nothing is told after that");
    free(&go);
    assert_eq!(embeddings.embed(&["aa"]), Ok(vec![one(2)]));
    let begun: Vec<_> = begins.try_iter().filter(|&length| length != 23).collect();
    assert_eq!(begun, [20, 21, 22, 2], "but for the fourth, which may have been under way");
}

#[test]
fn a_stop_is_heard_between_two_batches() {
    let (embeddings, begins, go) = fake(0);
    let (told, heard) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    let job = Behind::new(texts(&[1, 2, 3]), told, Arc::clone(&stop));
    embeddings.send(Job::Behind(job)).expect("there");
    assert_eq!(begins.recv(), Ok(1));
    stop.store(true, Ordering::Relaxed);
    free(&go);
    assert_eq!(
        heard.iter().collect::<Vec<_>>(),
        [Ok((0, one(1)))],
        "the batch under way is told, and then the end"
    );
    assert_eq!(begins.try_iter().count(), 0);
}

#[test]
fn work_is_cut_however_much_it_is() {
    let (mut embeddings, begins, go) = fake(0);
    free(&go);
    let mut seen = vec![false; 2000];
    let mut listen = |number: usize, _| {
        seen[number] = true;
        Flow::Continue
    };
    assert_eq!(embeddings.embed_behind(texts(&[8; 2000]), &mut listen), Ok(()));
    assert!(seen.iter().all(|seen| *seen));
    assert_eq!(begins.try_iter().count(), 3 * 512 / 32 + 464usize.div_ceil(32));
    assert_eq!(embeddings.embed_behind(vec![], &mut |_, _| Flow::Stop), Ok(()));
}

#[test]
fn a_model_that_cannot_be_loaded_says_so_every_time() {
    let (mut embeddings, _begins, go) = fake(4);
    free(&go);
    let not_yet = || SeamError::new("loading the embedder", "not yet");
    assert_eq!(embeddings.info(), Err(not_yet()));
    assert_eq!(embeddings.embed(&["a"]), Err(not_yet()));
    assert_eq!(embeddings.clone().embed_behind(texts(&[1, 2]), &mut |_, _| Flow::Continue), Err(not_yet()));
    assert_eq!(embeddings.embed(&[]), Err(not_yet()));
    assert_eq!(embeddings.embed(&["a"]), Ok(vec![one(1)]), "as soon as it can be");
}

#[test]
fn one_job_that_fails_is_only_one() {
    let (mut embeddings, _begins, go) = fake(0);
    free(&go);
    let mut told = 0;
    let mut listen = |_, _| {
        told += 1;
        Flow::Continue
    };
    let twelve = embeddings.embed_behind(texts(&[14, 12, 11]), &mut listen);
    assert_eq!(twelve, Err(SeamError::new("running the embedder", "twelve")));
    assert_eq!(told, 1, "what came before stands");
    let thirteen = embeddings.embed(&["aaaaaaaaaaaaa"]).map_err(|e| e.why);
    assert!(thirteen.is_err_and(|why| why.contains("a mistake in this program")));
    assert_eq!(embeddings.embed(&["a"]), Ok(vec![one(1)]));
}

#[test]
fn nothing_runs_on_when_nobody_is_left() {
    let (embeddings, begins, go) = fake(0);
    let (told, heard) = channel();
    let job = Behind::new(texts(&[1, 2, 3]), told, Arc::new(AtomicBool::new(false)));
    embeddings.send(Job::Behind(job)).expect("there");
    assert_eq!(begins.recv(), Ok(1));
    go.send(()).expect("there is room");
    let another = embeddings.clone();
    drop(embeddings);
    assert_eq!(begins.recv(), Ok(2), "a clone is somebody");
    drop(heard);
    free(&go);
    drop(another);
    assert_eq!(begins.try_iter().count(), 0, "its thread has ended");
}
