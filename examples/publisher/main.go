// A stream's source in Go, with the standard library alone, written from docs/PUBLISHING.md.
//
// It reads lines, makes each line an atomic operation of a bookmark (the line's number, u64) and an
// event of type 3 (the line), and publishes them, many in flight at once. It prints a line for each
// operation that is durable. After a lost connection it connects again and sends again what was not
// acknowledged: each operation is in the stream once.
//
//	publisher -server 127.0.0.1:6900 -token-file token < lines
package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

const (
	commandCapabilities = 0x1000
	commandPublish      = 0x1010
	commandCommit       = 0x1012
	commandWhere        = 0x1014

	packetEntry        = 0x02
	packetReceipt      = 0xf9
	packetLease        = 0xf8
	packetCapabilities = 0xfd
	packetResult       = 0xff

	featurePublish = 1 << 2
	typeBookmark   = 0xb0

	resultNoLease = 19
	resultTooSlow = 26

	maxInFlight = 256
	patience    = 10 * time.Second
)

// refusal is a Result other than OK.
type refusal struct {
	number uint32
	text   string
}

func (r *refusal) Error() string {
	return fmt.Sprintf("the server refused: %s (error %d)", r.text, r.number)
}

// passes says whether a new connection may help.
func (r *refusal) passes() bool { return r.number == resultNoLease || r.number == resultTooSlow }

// operation is an atomic operation that has no receipt yet.
type operation struct {
	first   uint64
	count   uint32
	request []byte
}

// publisher is a stream's source.
type publisher struct {
	server     string
	streamType uint64
	token      []byte
	sourceID   [16]byte
	epoch      uint64
	streamID   [16]byte
	lease      time.Duration
	next       uint64
	begun      bool
	connection net.Conn
	answers    *bufio.Reader
	inFlight   []operation
}

func (p *publisher) head(command uint64) []byte {
	return binary.BigEndian.AppendUint64(
		binary.BigEndian.AppendUint64(nil, command), p.streamType)
}

// packet reads a whole packet and checks its type; returns what follows type and length.
func (p *publisher) packet(kind byte, least int) ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(p.answers, head[:]); err != nil {
		return nil, err
	}
	size := int(binary.BigEndian.Uint32(head[1:]))
	if head[0] != kind || size < 5+least || size > 8192 {
		return nil, fmt.Errorf("a packet of type %#x, %d bytes, instead of %#x", head[0], size, kind)
	}
	body := make([]byte, size-5)
	_, err := io.ReadFull(p.answers, body)
	return body, err
}

// result reads a Result; one other than OK is a *refusal.
func (p *publisher) result() error {
	body, err := p.packet(packetResult, 4)
	if err != nil {
		return err
	}
	if number := binary.BigEndian.Uint32(body); number != 0 {
		return &refusal{number, string(body[4:])}
	}
	return nil
}

// connect connects, asks for the lease, and sends again what has no receipt.
func (p *publisher) connect() error {
	p.disconnect()
	connection, err := net.DialTimeout("tcp", p.server, patience)
	if err != nil {
		return err
	}
	p.connection, p.answers = connection, bufio.NewReader(connection)
	connection.SetDeadline(time.Now().Add(patience))

	if _, err = connection.Write(p.head(commandCapabilities)); err != nil {
		return err
	}
	if err = p.result(); err != nil {
		return err
	}
	body, err := p.packet(packetCapabilities, 4+8)
	if err != nil {
		return err
	}
	if binary.BigEndian.Uint64(body[4:])&featurePublish == 0 {
		return &refusal{9, "it accepts no publishers"}
	}

	request := p.head(commandPublish)
	request = binary.BigEndian.AppendUint32(request, 1) // revision
	request = binary.BigEndian.AppendUint64(request, p.epoch)
	request = append(request, p.sourceID[:]...)
	request = binary.BigEndian.AppendUint32(request, 0) // the server's own lease
	request = binary.BigEndian.AppendUint32(request, uint32(len(p.token)))
	if _, err = connection.Write(append(request, p.token...)); err != nil {
		return err
	}
	if err = p.result(); err != nil {
		return err
	}
	if body, err = p.packet(packetLease, 8+8+16+4+4+4+8); err != nil {
		return err
	}
	p.epoch = binary.BigEndian.Uint64(body)
	total := binary.BigEndian.Uint64(body[8:])
	if !p.begun {
		p.begun, p.next = true, total
		copy(p.streamID[:], body[16:32])
	} else if !bytes.Equal(p.streamID[:], body[16:32]) {
		return &refusal{21, "the server has another stream than before"}
	}
	p.lease = time.Duration(binary.BigEndian.Uint32(body[32:])) * time.Millisecond
	for _, made := range p.inFlight {
		if _, err = connection.Write(made.request); err != nil {
			return err
		}
	}
	return nil
}

func (p *publisher) disconnect() {
	if p.connection != nil {
		p.connection.Close()
		p.connection = nil
	}
}

// insist runs work on a connection, and again on new ones while they are lost.
func (p *publisher) insist(work func() error) error {
	wait, until := 50*time.Millisecond, time.Now().Add(time.Minute)
	for {
		err := error(nil)
		if p.connection == nil {
			err = p.connect()
		}
		if err == nil {
			p.connection.SetDeadline(time.Now().Add(patience))
			err = work()
		}
		if err == nil {
			return nil
		}
		p.disconnect()
		var refused *refusal
		if errors.As(err, &refused) && !refused.passes() || time.Now().After(until) {
			return err
		}
		time.Sleep(wait)
		wait = min(2*wait, 2*time.Second)
	}
}

// commit sends an operation of a bookmark and an event.
func (p *publisher) commit(key, data []byte) error {
	payload := appendEntry(nil, typeBookmark, p.next, key)
	payload = appendEntry(payload, 3, p.next+1, data)
	request := p.head(commandCommit)
	request = binary.BigEndian.AppendUint64(request, p.next)
	request = binary.BigEndian.AppendUint32(request, 2)
	request = binary.BigEndian.AppendUint32(request, uint32(len(payload)))
	made := operation{p.next, 2, append(request, payload...)}
	p.inFlight = append(p.inFlight, made)
	p.next += 2
	if p.connection != nil {
		p.connection.SetDeadline(time.Now().Add(patience))
		if _, err := p.connection.Write(made.request); err == nil {
			return nil
		}
		p.disconnect()
	}
	// connect sends it with the others.
	return p.insist(func() error { return nil })
}

func appendEntry(to []byte, kind uint32, number uint64, data []byte) []byte {
	to = append(to, packetEntry)
	to = binary.BigEndian.AppendUint32(to, uint32(17+len(data)))
	to = binary.BigEndian.AppendUint32(to, kind)
	to = binary.BigEndian.AppendUint64(to, number)
	return append(to, data...)
}

// receipt waits until the oldest operation is durable, and prints that.
func (p *publisher) receipt() error {
	oldest := p.inFlight[0]
	err := p.insist(func() error {
		if err := p.result(); err != nil {
			return err
		}
		body, err := p.packet(packetReceipt, 8+4+8)
		if err != nil {
			return err
		}
		first, count := binary.BigEndian.Uint64(body), binary.BigEndian.Uint32(body[8:])
		if first != oldest.first || count != oldest.count {
			return &refusal{22, fmt.Sprintf("a receipt for %d entries from %d on", count, first)}
		}
		return nil
	})
	if err != nil {
		return err
	}
	p.inFlight = p.inFlight[1:]
	fmt.Printf("entries %d to %d are on disk\n", oldest.first, oldest.first+uint64(oldest.count)-1)
	return nil
}

// keep renews the lease: it asks where the stream ends.
func (p *publisher) keep() error {
	return p.insist(func() error {
		if _, err := p.connection.Write(p.head(commandWhere)); err != nil {
			return err
		}
		if err := p.result(); err != nil {
			return err
		}
		_, err := p.packet(packetReceipt, 8+4+8)
		return err
	})
}

func (p *publisher) publish(lines <-chan []byte) error {
	if err := p.insist(func() error { return nil }); err != nil {
		return err
	}
	number := uint64(0)
	for {
		quiet := time.NewTimer(p.lease / 3)
		var line []byte
		more := true
		select {
		case line, more = <-lines:
		default:
			// Nothing to send: read a receipt, or wait for a line or the time to renew.
			if len(p.inFlight) > 0 {
				quiet.Stop()
				if err := p.receipt(); err != nil {
					return err
				}
				continue
			}
			select {
			case line, more = <-lines:
			case <-quiet.C:
				if err := p.keep(); err != nil {
					return err
				}
				continue
			}
		}
		quiet.Stop()
		if !more {
			break
		}
		key := binary.BigEndian.AppendUint64(nil, number)
		number++
		if err := p.commit(key, line); err != nil {
			return err
		}
		if len(p.inFlight) >= maxInFlight {
			if err := p.receipt(); err != nil {
				return err
			}
		}
	}
	for len(p.inFlight) > 0 {
		if err := p.receipt(); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	server := flag.String("server", "127.0.0.1:6900", "the server's `HOST:PORT`")
	streamType := flag.Uint64("stream-type", 1, "the stream's type")
	tokenFile := flag.String("token-file", "", "the `FILE` with the token")
	epoch := flag.Uint64("epoch", 0, "the epoch to have; 0: the next, if no source holds the lease")
	flag.Parse()

	source := publisher{server: *server, streamType: *streamType, epoch: *epoch}
	if _, err := rand.Read(source.sourceID[:]); err != nil {
		fail(err)
	}
	if *tokenFile != "" {
		content, err := os.ReadFile(*tokenFile)
		if err != nil {
			fail(err)
		}
		source.token, _, _ = bytes.Cut(bytes.TrimSpace(content), []byte("\n"))
	}
	lines := make(chan []byte)
	go func() {
		input := bufio.NewScanner(os.Stdin)
		input.Buffer(nil, 1<<20)
		for input.Scan() {
			lines <- bytes.Clone(input.Bytes())
		}
		close(lines)
	}()
	if err := source.publish(lines); err != nil {
		fail(err)
	}
	source.disconnect()
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "error:", err)
	os.Exit(1)
}
