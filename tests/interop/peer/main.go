// A test peer: the Go reference implementation in any role, driven by lines.
//
// Commands come on stdin, one a line, words apart by blanks, bytes in hex ("-" for
// none). Answers go to stdout, one JSON object a line. The library is fetched by
// `go build` at the version that go.mod pins; it is run beside ours to test and to
// measure against, and nothing of it is copied or shipped.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/0xPolygonHermez/zkevm-data-streamer/datastreamer"
	"github.com/0xPolygonHermez/zkevm-data-streamer/log"
)

// The reference wants timeouts and kills clients with them; ours are out of the way.
const never = 24 * time.Hour

type object map[string]any

var output = struct {
	sync.Mutex
	*bufio.Writer
}{Writer: bufio.NewWriterSize(os.Stdout, 1<<16)}

// say writes one line; it reaches the reader at once.
func say(line object) {
	encoded, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	output.Write(encoded)
	output.WriteByte('\n')
	output.Flush()
}

func fail(code int, format string, values ...any) {
	say(object{"ok": false, "error": fmt.Sprintf(format, values...)})
	os.Exit(code)
}

func describe(e datastreamer.FileEntry) object {
	return object{
		"number": e.Number, "type": uint32(e.Type), "length": len(e.Data), "data": hex.EncodeToString(e.Data),
	}
}

func describeHeader(h datastreamer.HeaderEntry) object {
	return object{
		"version": h.Version, "system_id": h.SystemID,
		"total_length": h.TotalLength, "total_entries": h.TotalEntries,
	}
}

// words are the parameters of one command, taken one by one; the first that
// cannot be read is remembered.
type words struct {
	rest []string
	err  error
}

func (w *words) next() string {
	if len(w.rest) == 0 {
		if w.err == nil {
			w.err = errors.New("a parameter is missing")
		}
		return ""
	}
	word := w.rest[0]
	w.rest = w.rest[1:]
	return word
}

func (w *words) number() uint64 {
	value, err := strconv.ParseUint(w.next(), 0, 64)
	if err != nil && w.err == nil {
		w.err = err
	}
	return value
}

func (w *words) bytes() []byte {
	word := w.next()
	if word == "-" {
		return []byte{}
	}
	value, err := hex.DecodeString(word)
	if err != nil && w.err == nil {
		w.err = err
	}
	return value
}

// converse answers each line of stdin with one JSON line, until "exit" or the end.
func converse(answer func(command string, w *words) (object, error)) {
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := lines.ReadString('\n')
		fields := strings.Fields(line)
		if len(fields) > 0 {
			if fields[0] == "exit" {
				say(object{"ok": true})
				return
			}
			w := &words{rest: fields[1:]}
			reply, problem := answer(fields[0], w)
			switch {
			case w.err != nil:
				fail(2, "%s: %v", fields[0], w.err)
			case problem != nil:
				say(object{"ok": false, "error": problem.Error()})
			default:
				if reply == nil {
					reply = object{}
				}
				reply["ok"] = true
				say(reply)
			}
		}
		if err != nil {
			return
		}
	}
}

type settings struct {
	file       string
	port       uint
	version    uint
	systemID   uint64
	streamType uint64
	log        log.Config
}

// portToUse looks for a free port where none is given: the library cannot tell
// which one the system gave it. Somebody else may take it in between; Start fails then.
func (s *settings) portToUse() uint16 {
	if s.port != 0 {
		return uint16(s.port)
	}
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		fail(1, "no free port: %v", err)
	}
	defer listener.Close()
	return uint16(listener.Addr().(*net.TCPAddr).Port)
}

func serve(s settings) {
	port := s.portToUse()
	server, err := datastreamer.NewServer(port, uint8(s.version), s.systemID,
		datastreamer.StreamType(s.streamType), s.file, never, never, never, &s.log)
	if err != nil {
		fail(1, "%v", err)
	}
	if err := server.Start(); err != nil {
		fail(1, "%v", err)
	}
	ready := describeHeader(server.GetHeader())
	ready["ok"], ready["port"] = true, port
	say(ready)
	converse(func(command string, w *words) (object, error) { return operate(server, command, w) })
}

func operate(server *datastreamer.StreamServer, command string, w *words) (object, error) {
	switch command {
	case "start_op":
		return nil, server.StartAtomicOp()
	case "commit":
		return nil, server.CommitAtomicOp()
	case "rollback":
		return nil, server.RollbackAtomicOp()
	case "bookmark", "entry":
		kind := uint64(0)
		if command == "entry" {
			kind = w.number()
		}
		data := w.bytes()
		if w.err != nil {
			return nil, nil
		}
		var number uint64
		var err error
		if command == "entry" {
			number, err = server.AddStreamEntry(datastreamer.EntryType(kind), data)
		} else {
			number, err = server.AddStreamBookmark(data)
		}
		return object{"number": number}, err
	case "truncate":
		number := w.number()
		if w.err != nil {
			return nil, nil
		}
		return nil, server.TruncateFile(number)
	case "update":
		number, kind, data := w.number(), w.number(), w.bytes()
		if w.err != nil {
			return nil, nil
		}
		return nil, server.UpdateEntryData(number, datastreamer.EntryType(kind), data)
	case "get_header":
		return describeHeader(server.GetHeader()), nil
	case "get_entry":
		entry, err := server.GetEntry(w.number())
		return describe(entry), err
	case "get_bookmark":
		number, err := server.GetBookmark(w.bytes())
		return object{"number": number}, err
	case "first_event":
		entry, err := server.GetFirstEventAfterBookmark(w.bytes())
		return describe(entry), err
	case "between":
		from, to := w.bytes(), w.bytes()
		data, err := server.GetDataBetweenBookmarks(from, to)
		return object{"data": hex.EncodeToString(data)}, err
	case "append": // OPERATIONS ENTRIES SIZE RATE BOOKMARKS
		operations, entries, size := w.number(), w.number(), w.number()
		rate, bookmarks := w.number(), w.number() != 0
		if w.err != nil {
			return nil, nil
		}
		return appendMany(server, operations, entries, size, rate, bookmarks)
	}
	return nil, fmt.Errorf("unknown command %q", command)
}

// appendMany commits made-up operations, `rate` a second (0: as fast as it goes).
// The first 8 bytes of each entry are the time at which its operation began, in
// nanoseconds since 1970.
func appendMany(server *datastreamer.StreamServer, operations, entries, size, rate uint64, bookmarks bool) (object, error) {
	if size < 8 {
		return nil, errors.New("the size of an entry is 8 at least")
	}
	began := time.Now()
	for operation := uint64(0); operation < operations; operation++ {
		if rate > 0 {
			due := began.Add(time.Duration(operation) * time.Second / time.Duration(rate))
			time.Sleep(time.Until(due))
		}
		stamp := uint64(time.Now().UnixNano())
		if err := server.StartAtomicOp(); err != nil {
			return nil, err
		}
		if bookmarks {
			key := make([]byte, 9)
			binary.BigEndian.PutUint64(key[1:], operation)
			if _, err := server.AddStreamBookmark(key); err != nil {
				return nil, err
			}
		}
		for entry := uint64(0); entry < entries; entry++ {
			// The library keeps the slice until it is sent: each entry has its own.
			data := make([]byte, size)
			binary.BigEndian.PutUint64(data, stamp)
			if _, err := server.AddStreamEntry(1, data); err != nil {
				return nil, err
			}
		}
		if err := server.CommitAtomicOp(); err != nil {
			return nil, err
		}
	}
	return object{"seconds": time.Since(began).Seconds(), "entries": operations * entries}, nil
}

func relay(s settings, upstream string) {
	port := s.portToUse()
	relay, err := datastreamer.NewRelay(upstream, port, uint8(s.version), s.systemID,
		datastreamer.StreamType(s.streamType), s.file, never, never, never, &s.log)
	if err != nil {
		fail(1, "%v", err)
	}
	if err := relay.Start(); err != nil {
		fail(1, "%v", err)
	}
	say(object{"ok": true, "port": port})
	converse(func(command string, w *words) (object, error) {
		return nil, fmt.Errorf("unknown command %q", command)
	})
}

func connect(s settings, address string, each datastreamer.ProcessEntryFunc) *datastreamer.StreamClient {
	client, err := datastreamer.NewClient(address, datastreamer.StreamType(s.streamType))
	if err != nil {
		fail(1, "%v", err)
	}
	client.SetProcessEntryFunc(each)
	if err := client.Start(); err != nil {
		fail(1, "%v", err)
	}
	return client
}

// follow is a client that does what the lines say; entries that it is sent are
// lines of their own, with "entry" instead of "ok".
func follow(s settings, address string) {
	client := connect(s, address, func(e *datastreamer.FileEntry, _ *datastreamer.StreamClient, _ *datastreamer.StreamServer) error {
		say(object{"entry": describe(*e)})
		return nil
	})
	say(object{"ok": true})
	converse(func(command string, w *words) (object, error) {
		switch command {
		case "start":
			return nil, client.ExecCommandStart(w.number())
		case "start_bookmark":
			return nil, client.ExecCommandStartBookmark(w.bytes())
		case "stop":
			return nil, client.ExecCommandStop()
		case "header":
			header, err := client.ExecCommandGetHeader()
			return describeHeader(header), err
		case "entry":
			entry, err := client.ExecCommandGetEntry(w.number())
			return describe(entry), err
		case "bookmark":
			entry, err := client.ExecCommandGetBookmark(w.bytes())
			return describe(entry), err
		}
		return nil, fmt.Errorf("unknown command %q", command)
	})
}

// read takes `count` entries and says how many there were, how long it took, and
// (with digest) the SHA-256 of their bytes as they stand in the file.
func read(s settings, address string, from uint64, bookmark string, count uint64, digest bool, timeout time.Duration) {
	var sum hash.Hash
	if digest {
		sum = sha256.New()
	}
	var seen, size uint64
	var expected *uint64
	done := make(chan error, 1)
	client := connect(s, address, func(e *datastreamer.FileEntry, _ *datastreamer.StreamClient, _ *datastreamer.StreamServer) error {
		if seen == count {
			return nil
		}
		if expected != nil && e.Number != *expected {
			done <- fmt.Errorf("entry %d came where %d was due", e.Number, *expected)
			return io.ErrUnexpectedEOF
		}
		next := e.Number + 1
		expected = &next
		if sum != nil {
			sum.Write(e.Encode())
		}
		seen++
		size += uint64(e.Length)
		if seen == count {
			done <- nil
		}
		return nil
	})
	if count == 0 {
		header, err := client.ExecCommandGetHeader()
		if err != nil {
			fail(1, "%v", err)
		}
		if from >= header.TotalEntries {
			fail(1, "nothing to read: %d entries, from %d", header.TotalEntries, from)
		}
		count = header.TotalEntries - from
	}
	began := time.Now()
	started := make(chan error, 1)
	go func() {
		if bookmark != "" {
			w := words{rest: []string{bookmark}}
			key := w.bytes()
			if w.err != nil {
				started <- w.err
				return
			}
			started <- client.ExecCommandStartBookmark(key)
		} else {
			started <- client.ExecCommandStart(from)
		}
	}()
	deadline := time.After(timeout)
	for waiting := true; waiting; {
		select {
		case err := <-started:
			if err != nil {
				fail(1, "%v", err)
			}
		case err := <-done:
			if err != nil {
				fail(1, "%v", err)
			}
			waiting = false
		case <-deadline:
			fail(3, "not done within %v", timeout)
		}
	}
	result := object{"ok": true, "entries": seen, "bytes": size, "seconds": time.Since(began).Seconds()}
	if sum != nil {
		result["sha256"] = hex.EncodeToString(sum.Sum(nil))
	}
	say(result)
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: peer serve|relay|client|read [options]; -h after one of them lists its options")
		os.Exit(2)
	}
	s := settings{log: log.Config{Environment: "production", Outputs: []string{"stderr"}}}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	flags.StringVar(&s.file, "file", "", "stream file (no dot in the folders' names)")
	flags.UintVar(&s.port, "port", 0, "port to listen on; 0 looks for a free one")
	flags.UintVar(&s.version, "version", 1, "stream version of a new file")
	flags.Uint64Var(&s.systemID, "system-id", 0, "system id of a new file")
	flags.Uint64Var(&s.streamType, "stream-type", 1, "stream type")
	flags.StringVar(&s.log.Level, "log", "warn", "level of the library's log, on stderr")
	address := flags.String("address", "", "server to connect to, HOST:PORT")
	from := flags.Uint64("from", 0, "read: first entry")
	count := flags.Uint64("count", 0, "read: number of entries; 0: to the end as it is now")
	bookmark := flags.String("bookmark", "", "read: start from this bookmark (hex)")
	digest := flags.Bool("digest", false, "read: hash the entries")
	timeout := flags.Duration("timeout", time.Minute, "read: give up after this")
	flags.Parse(os.Args[2:])
	log.Init(s.log)

	switch os.Args[1] {
	case "serve":
		serve(s)
	case "relay":
		relay(s, *address)
	case "client":
		follow(s, *address)
	case "read":
		read(s, *address, *from, *bookmark, *count, *digest, *timeout)
	default:
		fail(2, "unknown subcommand %q", os.Args[1])
	}
}
