package clusters

import (
	"bytes"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/csr/kube"
)

// TestWhatTheConfigSaysOfTokens: the review of tokens is off unless it is asked for, and each cluster has its own.
func TestWhatTheConfigSaysOfTokens(t *testing.T) {
	all, err := Parse([]Config{
		{Name: "a", TokenReview: "fallback", MaxRenewalAge: "2h"}, {Name: "b", TokenReview: "always"}, {Name: "c"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(all.reviews, []kube.Mode{kube.Fallback, kube.Always, kube.Never}) {
		t.Errorf("reviews: %v", all.reviews)
	}
	if !slices.Equal(all.renewalAges, []time.Duration{2 * time.Hour, 0, 0}) { // csr takes its default for 0, 24h
		t.Errorf("renewal ages: %v", all.renewalAges)
	}
}

// TestLostClusterDoesNotStopTheServer: only a cluster that has never been ready keeps a server from being ready.
func TestLostClusterDoesNotStopTheServer(t *testing.T) {
	var state error
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	c := &Cluster{Name: "east", Ready: func() error { return state }}

	state = errors.New("pods: not listed yet")
	c.Note(logger)
	if c.Blocks() == nil || log.Len() > 0 {
		t.Error("a cluster that was never ready counts as ready, or as lost:", log.String())
	}
	state = nil
	c.Note(logger)
	if err := c.Blocks(); err != nil {
		t.Error(err)
	}
	state = errors.New("pods: the watch is broken")
	for range 3 {
		c.Note(logger)
	}
	if err := c.Blocks(); err != nil {
		t.Errorf("a cluster that is lost stops the server: %v", err)
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "cluster=east") || !strings.Contains(log.String(), "the watch is broken") {
		t.Errorf("a lost cluster is logged %d times: %s", n, log.String())
	}
	state = nil
	c.Note(logger)
	c.Note(logger)
	if n := strings.Count(log.String(), "cluster is back"); n != 1 {
		t.Errorf("its return is logged %d times", n)
	}
}
