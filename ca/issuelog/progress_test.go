package issuelog_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/issuelog"
)

func TestProgress(t *testing.T) {
	c := create(t)
	l := open(t, c)
	write(t, l, 0, 3) // an intent and a certificate each
	if p := l.Progress(); p.Size != 6 || p.Covered != 0 || p.Sequenced.IsZero() || p.Err != nil || p.Failed != nil {
		t.Errorf("before a checkpoint: %+v", p)
	}
	begun := time.Now()
	if err := l.Sequence(); err != nil {
		t.Fatal(err)
	}
	p := l.Progress()
	if p.Size != 6 || p.Covered != 6 || p.Checkpoint.Before(begun) || p.Sequenced.Before(begun) {
		t.Errorf("after it: %+v", p)
	}
	if err := l.Sequence(); err != nil { // with nothing to do
		t.Fatal(err)
	}
	if again := l.Progress(); !again.Checkpoint.Equal(p.Checkpoint) || again.Sequenced.Before(p.Sequenced) {
		t.Errorf("without new entries: %+v after %+v", again, p)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Progress().Err; err == nil {
		t.Error("a closed log takes entries")
	}

	// After a restart the checkpoint is as old as its file.
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	if err := os.Chtimes(filepath.Join(c.Dir, issuelog.CheckpointFile), old, old); err != nil {
		t.Fatal(err)
	}
	if p := open(t, c).Progress(); p.Size != 6 || p.Covered != 6 || !p.Checkpoint.Equal(old) || p.Sequenced.Before(begun) {
		t.Errorf("after a restart: %+v, want a checkpoint of %s", p, old)
	}
}

// TestProgressOfALogThatFails: entries are taken, but no checkpoint covers them.
func TestProgressOfALogThatFails(t *testing.T) {
	c := create(t)
	l := open(t, c)
	before := l.Progress()
	why := errors.New("the disk is full")
	mend := durable.Inject(c.Dir, func(s durable.Step, do func(int) error) error {
		if s.Kind == durable.Write && strings.HasSuffix(s.Path, issuelog.CheckpointFile+".new") {
			return why
		}
		return do(-1)
	})
	t.Cleanup(mend)
	write(t, l, 0, 1)
	if err := l.Sequence(); !errors.Is(err, why) {
		t.Fatal(err)
	}
	if p := l.Progress(); p.Size != 2 || p.Covered != 0 || !errors.Is(p.Failed, why) || p.Err != nil || !p.Sequenced.Equal(before.Sequenced) {
		t.Errorf("while it fails: %+v", p)
	}
	mend()
	if err := l.Sequence(); err != nil {
		t.Fatal(err)
	}
	if p := l.Progress(); p.Covered != 2 || p.Failed != nil || !p.Sequenced.After(before.Sequenced) {
		t.Errorf("once it works again: %+v", p)
	}
}
