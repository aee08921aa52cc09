use std::sync::atomic::AtomicBool;

use super::*;

/// The bytes of one file, and the requests for them (offset, length).
#[derive(Debug)]
struct Memory {
    content: Vec<u8>,
    asked: Asked,
    fails: AtomicBool,
}

impl Requests for Memory {
    fn request(&self, _: u32, offset: u64, len: usize) -> Result<Box<dyn BlockBytes>> {
        self.asked.lock().unwrap().push((offset, len));
        if self.fails.swap(false, Ordering::Relaxed) {
            return Err(Finding::new(codes::SOURCE_CHANGED, "replaced").into());
        }
        Ok(Box::new(self.content[offset as usize..offset as usize + len].to_vec()))
    }
}

type Asked = Arc<Mutex<Vec<(u64, usize)>>>;

fn store(size: usize, room: u64, fails: bool) -> (Arc<dyn Ranges>, Vec<u8>, Asked) {
    let content: Vec<u8> = (0..size).map(|i| ((i * 2_654_435_761) >> 7) as u8).collect();
    let asked = Asked::default();
    let requests = Memory { content: content.clone(), asked: Arc::clone(&asked), fails: fails.into() };
    let listed = Listed { path: "a/b".into(), size: size as u64, mtime_ns: 5 };
    let files = StoreFiles::new("/r".into(), "s3://x".into(), vec![listed], room, Box::new(requests));
    (StoreProvider(files).file(Path::new("/r/a/b")).unwrap(), content, asked)
}

#[test]
fn reads_are_exact_and_requests_grow() {
    let (file, content, asked) = store(20 << 20, 64 << 20, false);
    assert_eq!(file.identity(), Some((20 << 20, 5)));
    let mut at = 0;
    while at < content.len() {
        let mut bytes = vec![0; 5000.min(content.len() - at)];
        file.read(at as u64, &mut bytes).unwrap();
        assert!(bytes == content[at..at + bytes.len()]);
        at += bytes.len();
    }
    let asked = asked.lock().unwrap();
    assert_eq!(asked[0], (0, 256 << 10));
    assert!(asked.len() < 10, "{asked:?}");
    // No byte is asked for twice.
    assert_eq!(asked.iter().map(|(_, len)| len).sum::<usize>(), content.len());
}

#[test]
fn strided_reads_by_threads_are_exact_in_little_room() {
    let (file, content, _) = store(6 << 20, 1 << 20, false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (file, content) = (&file, &content);
            scope.spawn(move || {
                for row in 0..700 {
                    let at = row * 8192 + thread * 2048;
                    let mut bytes = [0; 2048];
                    file.read(at as u64, &mut bytes).unwrap();
                    assert!(bytes[..] == content[at..at + 2048]);
                }
            });
        }
    });
}

#[test]
fn announced_ranges_are_requested_once_and_no_more_than_they_are() {
    let (file, content, asked) = store(8 << 20, 4 << 20, false);
    // The second begins in the first, the third joins it, the fifth ends beyond the file.
    let end = 8 << 20;
    let ranges = [(0, 100), (50, 200), (1000, 1100), (3 << 20, (3 << 20) + 10), (end - 5, end + 50)];
    file.will_read(&ranges, true).unwrap();
    for &(lo, hi) in &ranges {
        let hi = hi.min(end);
        let mut bytes = vec![0; (hi - lo) as usize];
        file.read(lo, &mut bytes).unwrap();
        assert!(bytes == content[lo as usize..hi as usize]);
    }
    // What is here is not requested again.
    file.will_read(&ranges, true).unwrap();
    let mut asked = asked.lock().unwrap().clone();
    asked.sort_unstable();
    assert_eq!(asked, [(0, 1100), (3 << 20, 10), (end - 5, 5)]);
}

#[test]
fn announced_ranges_that_find_no_room_are_requested_when_they_are_read() {
    let (file, content, asked) = store(8 << 20, 1 << 20, false);
    file.will_read(&[(0, 4 << 20)], true).unwrap();
    // Half of the room holds the first of them, which threads request at any time. The others wait for their reader.
    let announced = asked.lock().unwrap().clone();
    assert!(announced.iter().all(|&(at, len)| at + len as u64 <= 512 << 10), "{announced:?}");
    let mut bytes = [0; 8];
    file.read(1 << 20, &mut bytes).unwrap();
    assert!(bytes == content[1 << 20..(1 << 20) + 8]);
    assert!(asked.lock().unwrap().iter().any(|&(at, _)| at == 1 << 20));
}

/// Reads of rows of two halves of a file, as a merge of two columns makes them.
fn strided(rows: u64) -> Vec<(u64, u64)> {
    let row = |i: u64| [i * 8192, rows * 8192 + i * 8192].map(|at| (at, at + 4096));
    (0..rows).flat_map(row).collect()
}

#[test]
fn scheduled_reads_are_requested_at_once_and_leave_nothing() {
    let rows = 256;
    let (file, content, asked) = store(rows as usize * 16384, 8 << 20, false);
    let reads = strided(rows);
    file.schedule(reads.clone(), &|| Readers::Busy);
    for (i, &(lo, hi)) in reads.iter().enumerate() {
        let mut bytes = vec![0; (hi - lo) as usize];
        file.read(lo, &mut bytes).unwrap();
        assert!(bytes == content[lo as usize..hi as usize], "read {i}");
    }
    let asked = std::mem::take(&mut *asked.lock().unwrap());
    // Two requests of 2 MiB each: what lies between the rows comes with them, but for the last gaps.
    assert_eq!(asked.iter().map(|(_, len)| len).sum::<usize>(), content.len() - 2 * 4096);
    assert!(asked.len() <= 3, "{asked:?}");
}

#[test]
fn scheduled_reads_find_room_as_others_are_read() {
    let (file, content, asked) = store(16 << 20, 1 << 20, false);
    let groups: Vec<Vec<(u64, u64)>> =
        (0..32).map(|i| (0..8).map(|k| ((i * 8 + k) << 16, (i * 8 + k + 1) << 16)).collect()).collect();
    std::thread::scope(|scope| {
        let to_read = groups.clone();
        let (file, content) = (&file, &content);
        scope.spawn(move || groups.into_iter().for_each(|reads| file.schedule(reads, &|| Readers::Busy)));
        for (lo, hi) in to_read.into_iter().flatten() {
            let mut bytes = vec![0; (hi - lo) as usize];
            // Wait for the schedule, as workers do.
            while !asked.lock().unwrap().iter().any(|&(at, len)| at + len as u64 >= hi) {
                std::thread::yield_now();
            }
            file.read(lo, &mut bytes).unwrap();
            assert!(bytes == content[lo as usize..hi as usize]);
        }
    });
    let asked = asked.lock().unwrap();
    assert_eq!(asked.iter().map(|(_, len)| len).sum::<usize>(), content.len());
    assert!(asked.iter().all(|(_, len)| *len <= 256 << 10));
}

#[test]
fn scheduled_reads_that_do_not_come_hold_nobody_up() {
    let (file, content, _) = store(4 << 20, 1 << 20, false);
    file.schedule(vec![(0, 1 << 20)], &|| Readers::Busy);
    file.schedule(vec![(1 << 20, 2 << 20)], &|| Readers::Stopped);
    file.schedule(vec![(2 << 20, 3 << 20)], &|| Readers::Idle);
    let mut bytes = vec![0; 4 << 20];
    file.read(0, &mut bytes).unwrap();
    assert!(bytes == content);
}

/// Reads of 4 KiB that are too far apart for one request.
fn distant(count: u64) -> Vec<(u64, u64)> {
    (0..count).map(|i| i * (128 << 10)).map(|at| (at, at + 4096)).collect()
}

#[test]
fn what_is_scheduled_and_not_begun_is_not_requested_after_the_end() {
    #[derive(Debug)]
    struct Slow(Arc<AtomicU64>);
    impl Requests for Slow {
        fn request(&self, _: u32, _: u64, len: usize) -> Result<Box<dyn BlockBytes>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(50));
            Ok(Box::new(vec![0; len]))
        }
    }
    for is_stopped in [false, true] {
        let made = Arc::new(AtomicU64::new(0));
        let listed = Listed { path: "a".into(), size: 64 << 20, mtime_ns: 5 };
        let requests = Box::new(Slow(Arc::clone(&made)));
        let files = StoreFiles::new("/r".into(), "s3://x".into(), vec![listed], 8 << 20, requests);
        files.schedule(0, distant(500), &|| Readers::Busy);
        if !is_stopped {
            files.end_schedule();
        }
        files.stop();
        // Those that each thread has begun.
        assert!(made.load(Ordering::Relaxed) <= 2 * AHEAD as u64, "{made:?}");
    }
}

#[test]
fn what_nobody_reads_leaves_room_after_the_end() {
    let (file, content, asked) = store(8 << 20, 2 << 20, false);
    for lo in [0, 1 << 20, 2 << 20, 3 << 20] {
        // Waits for ever if the one before it keeps the room.
        file.schedule(vec![(lo, lo + (1 << 20))], &|| Readers::Busy);
        file.end_schedule();
    }
    let mut bytes = vec![0; 4096];
    file.read(7 << 20, &mut bytes).unwrap();
    assert!(bytes == content[7 << 20..(7 << 20) + 4096]);
    assert!(asked.lock().unwrap().len() <= 2 * 4 * 2 + 1);
}

#[test]
fn what_two_groups_read_is_requested_once() {
    let (file, content, asked) = store(8 << 20, 8 << 20, false);
    let range = (1 << 20, (1 << 20) + 4096);
    file.schedule(vec![range], &|| Readers::Busy);
    file.schedule(vec![range], &|| Readers::Busy);
    for _ in 0..2 {
        let mut bytes = vec![0; 4096];
        file.read(range.0, &mut bytes).unwrap();
        assert!(bytes == content[range.0 as usize..range.1 as usize]);
    }
    assert_eq!(asked.lock().unwrap().len(), 1);
}

#[test]
fn a_failed_request_is_made_again_by_the_next_reader() {
    // In little room the next request would be made ahead, and be the one that fails.
    let (file, content, asked) = store(1 << 20, 64 << 20, true);
    let mut bytes = [0; 8];
    let error = file.read(0, &mut bytes).unwrap_err();
    assert_eq!(error.findings()[0].code, codes::SOURCE_CHANGED);
    file.read(0, &mut bytes).unwrap();
    assert!(bytes == content[..8] && asked.lock().unwrap().len() == 2);
}
