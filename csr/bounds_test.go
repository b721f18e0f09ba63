package csr_test

import (
	"crypto/tls"
	"encoding/binary"
	"io"
	"testing"
)

// TestBoundsOfAConnection reads what the server lets a client do from its first HTTP/2 frame (RFC 9113, section 6.5).
func TestBoundsOfAConnection(t *testing.T) {
	w := newWorld(t)
	conn, err := tls.Dial("tcp", w.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) // only its settings are of interest
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if v := conn.ConnectionState().Version; v != tls.VersionTLS13 {
		t.Errorf("TLS version %x", v)
	}
	if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
		t.Fatal(err)
	}
	var head [9]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		t.Fatal(err)
	}
	if head[3] != 4 {
		t.Fatalf("the first frame is of type %d", head[3])
	}
	settings := make([]byte, binary.BigEndian.Uint32(append([]byte{0}, head[:3]...)))
	if _, err := io.ReadFull(conn, settings); err != nil {
		t.Fatal(err)
	}
	got := map[uint16]uint32{}
	for ; len(settings) >= 6; settings = settings[6:] {
		got[binary.BigEndian.Uint16(settings)] = binary.BigEndian.Uint32(settings[2:])
	}
	const maxConcurrentStreams, initialWindow, maxHeaderList = 3, 4, 6
	if got[maxConcurrentStreams] != 250 || got[maxHeaderList] != 64<<10 || got[initialWindow] > 64<<10 {
		t.Errorf("settings %v", got)
	}
}
