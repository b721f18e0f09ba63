package server

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// A server that is told to stop says first that it is not ready, serves on meanwhile, and listens no more at the end.
func TestDrainGoesInOrder(t *testing.T) {
	srv, stop := started(t, "connections: {drainDelay: 2s}\n")
	readyz := func() string {
		resp, err := http.Get("http://" + srv.metrics.Addr().String() + "/readyz")
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err.Error()
		}
		return resp.Status + " " + string(body)
	}
	if got := readyz(); !strings.HasPrefix(got, "200") {
		t.Fatal(got)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }()
	for !srv.grpc.Stopping() {
		time.Sleep(time.Millisecond)
	}
	if got := readyz(); !strings.HasPrefix(got, "503") || !strings.Contains(got, "the server is stopping") {
		t.Errorf("a server that stops is %s", got)
	}
	conn, err := tls.Dial("tcp", srv.listener.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err != nil {
		t.Errorf("it does not serve on: %v", err)
	} else {
		conn.Close()
	}
	<-stopped
	if _, err := net.Dial("tcp", srv.listener.Addr().String()); err == nil {
		t.Error("it still listens")
	}
}
