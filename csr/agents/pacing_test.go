package agents

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// crowd is a hub with many streams, each of which has the first update.
type crowd struct {
	*Hub
	t       *testing.T
	mark    uint64
	streams []*stream
}

func newCrowd(t *testing.T, n int) *crowd {
	c := &crowd{t: t}
	c.Hub = New(Config{Mark: func() *chanceryv1.DocumentMark { return &chanceryv1.DocumentMark{Version: c.mark} }})
	publish(t, c.Hub, crl("1"))
	now := time.Now()
	for range n {
		s := c.come()
		if n, _, _ := c.next(s, now); n.update == nil {
			t.Fatal("a new stream gets nothing")
		}
	}
	return c
}

func (c *crowd) come() *stream {
	s := &stream{id: "a", place: string(binary(len(c.streams))), look: time.NewTimer(time.Hour)}
	if err := c.join(s); err != nil {
		c.t.Fatal(err)
	}
	c.streams = append(c.streams, s)
	return s
}

func binary(n int) []byte { return []byte{byte(n >> 8), byte(n)} }

// sent counts the streams that are sent something by then, and those that are told to replace SVIDs.
func (c *crowd) sent(now time.Time) (sent, told int) {
	c.t.Helper()
	for _, s := range c.streams {
		n, changed, again := c.next(s, now)
		u, r := n.update, n.reissue
		switch {
		case u == nil && (changed == nil || !again.IsZero() && !again.After(now)):
			c.t.Fatalf("nothing now, and the next look at %s would be too early", again)
		case u != nil:
			sent++
		}
		if r != nil {
			told++
			if within := r.GetWithin().AsDuration(); within > toldWithin || !bytes.Equal(r.GetIssuers()[0], []byte("old")) {
				c.t.Errorf("told %v", r)
			}
		}
	}
	return sent, told
}

func (c *crowd) want(what string, now time.Time, sentFrom, sentTo, toldFrom, toldTo int) {
	c.t.Helper()
	if sent, told := c.sent(now); sent < sentFrom || sent > sentTo || told < toldFrom || told > toldTo {
		c.t.Errorf("%s: %d were sent something, want %d to %d; %d were told, want %d to %d", what, sent, sentFrom, sentTo, told, toldFrom, toldTo)
	}
}

func reissue(text string, within time.Duration) *chanceryv1.SyncUpdate {
	u := crl(text)
	u.Reissue = &chanceryv1.Reissue{Issuers: [][]byte{[]byte("old")}, Within: durationpb.New(within)}
	return u
}

// What asks agents to replace their SVIDs is told over the time for all, to each once, and has nothing to acknowledge; that it is over
// they hear at once, and so they do of roots and CRLs meanwhile.
func TestD19AgentsAreToldToReissueOneAfterTheOther(t *testing.T) {
	c := newCrowd(t, 1000)
	before := c.current.version
	u := reissue("1", 20*time.Second)
	kept := proto.CloneOf(u)
	publish(t, c.Hub, u)
	if !proto.Equal(u, kept) {
		t.Error("what was published is not what it was")
	}
	now := time.Now()
	if c.current.version != before {
		t.Error("there is something to acknowledge")
	}
	c.want("at once", now, 0, 5, 0, 5)
	c.want("after half of the time", now.Add(10*time.Second), 380, 620, 380, 620)

	publish(t, c.Hub, reissue("2", 30*time.Second)) // of which each hears at once, and those again who were told
	c.want("with a new CRL", now.Add(10*time.Second), 1000, 1000, 380, 620)
	c.want("the moment after", now.Add(10*time.Second), 0, 0, 0, 0)
	late := c.come()
	if n, _, _ := c.next(late, now.Add(11*time.Second)); n.update == nil || n.reissue.GetWithin().AsDuration() != 20*time.Second {
		t.Errorf("one that comes meanwhile is told %v", n.reissue) // many may
	}
	c.want("after all of the time", now.Add(21*time.Second), 380, 620, 380, 620)
	c.want("then", now.Add(time.Hour), 0, 0, 0, 0)

	publish(t, c.Hub, crl("2"))
	c.want("that it is over", now.Add(time.Hour), 1001, 1001, 0, 0)
	c.want("then", now.Add(2*time.Hour), 0, 0, 0, 0)
}

// What only brings checkpoints, or a mark, is spread; who has not been sent it gets it along with what comes meanwhile.
func TestCheckpointsAreSpread(t *testing.T) {
	c := newCrowd(t, 2000)
	c.mark++
	now := time.Now()
	c.PushCheckpoints(now)
	c.want("at once", now, 0, 10, 0, 0)
	c.want("after half of the time", now.Add(time.Second), 800, 1200, 0, 0)
	c.mark++
	c.PushCheckpoints(now.Add(time.Minute)) // those who wait still have not to wait anew
	c.want("with newer ones", now.Add(2*time.Second), 800, 1200, 0, 0)
	publish(t, c.Hub, crl("2"))
	c.want("with a new CRL", now.Add(2*time.Second), 2000, 2000, 0, 0)
	c.want("then", now.Add(time.Hour), 0, 0, 0, 0)
}
