// Command reissue measures what a compromised root costs: a fleet of agents holds SVIDs, `chancery rotate start --root --reason
// compromised` is typed, and each SVID has to be replaced, while new pods go on to ask for their first one. It owns the fleet, the new
// pods and the arithmetic. It refuses to hide a new pod that got no certificate, or an SVID that was replaced more than once: both are
// counted, and one is enough for exit code 1.
//
// The server is the real one, with SQLite, its audit log on, and a key set for tokens. Agents are what `chancery agent` is made of,
// less its socket: keeper, client with its stream, pinned bundle key, table of consumers; some thousand share a process. New pods ask
// over connections of their own. Time counts from the moment at which the rotation was last seen in the phase before reissue.
//
// All share the machine's processors, which fleets elsewhere do not, so their processor time is printed apart. The floor is the same
// number of certificates from the same server, as fast as it goes, over connections that are kept.
//
// Output:
//
//	fleet agents=N nodes=N start=Ns                                  until all have an SVID and a stream
//	reissue agents=N seconds=N rate=N/s target=500/s twice=N failed=N
//	new-pods when=reissue rate=20/s n=N p50=Nms p99=Nms max=Nms failed=N target=100ms   (then when=quiet, without a target)
//	cpu who=server seconds=N svid=Nus                                (then who=agents, who=new-pods; between the same moments)
//	floor rate=N/s n=N
//	reissue ratio=N
//
// where failed are tries for an SVID.
//
//	go run ./test/bench/reissue          # builds cmd/chancery, or takes CHANCERY_BIN
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/chancery-project/chancery/test/bench/parts"
)

// Targets of DESIGN.md, on two processors.
const (
	targetRate = 500 // a second,
	targetWait = 100 * time.Millisecond
)

// config is what the flags say.
type config struct {
	agents, nodes int
	processes     int // that play the agents
	pods          int // new ones, a second
	quiet         time.Duration
	limit         time.Duration // for each wait
	dir           string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if len(os.Args) == 3 && os.Args[1] == fleetArgument {
		err = play(ctx, os.Args[2])
	} else {
		err = run(ctx, os.Args[1:], os.Stdout)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "reissue:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (config, error) {
	var c config
	flags := flag.NewFlagSet("reissue", flag.ContinueOnError)
	flags.IntVar(&c.agents, "agents", 10_000, "agents, with one identity each")
	flags.IntVar(&c.nodes, "nodes", 100, "nodes that they are on")
	flags.IntVar(&c.processes, "processes", 2, "processes that play the agents")
	flags.IntVar(&c.pods, "pods", 20, "new pods a second")
	flags.DurationVar(&c.quiet, "quiet", 10*time.Second, "how long new pods are measured afterwards")
	flags.DurationVar(&c.limit, "limit", 5*time.Minute, "for the fleet to start, and for each SVID to be replaced")
	flags.StringVar(&c.dir, "dir", "", "where to make the temporary directory (default: /dev/shm if there is one, else the system's place)")
	if err := flags.Parse(args); err != nil {
		return config{}, err
	}
	if c.agents < 1 || c.nodes < 1 || c.processes < 1 || c.pods < 1 {
		return config{}, errors.New("reading flags: -agents, -nodes, -processes and -pods must be 1 or more")
	}
	if info, err := os.Stat("/dev/shm"); c.dir == "" && err == nil && info.IsDir() {
		c.dir = "/dev/shm"
	}
	return c, nil
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	c, err := parseFlags(args)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(c.dir, "chancery-bench-reissue-")
	if err != nil {
		return fmt.Errorf("making temporary directory: %w", err)
	}
	defer os.RemoveAll(dir)
	tokens, err := parts.NewTokens(filepath.Join(dir, "jwks.json"))
	if err != nil {
		return err
	}
	s, err := startServer(ctx, dir)
	if err != nil {
		return err
	}
	defer s.stop()
	begun := time.Now()
	f, err := startFleet(ctx, c, dir, s.addr, tokens)
	if err != nil {
		return err
	}
	defer f.stop()
	if err := f.await(ctx, c.limit, func(n counts) bool { return n.Held == c.agents }); err != nil {
		return fmt.Errorf("waiting for each agent's first SVID: %w", err)
	}
	if err := s.awaitSync(ctx, c.agents, c.limit); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "fleet agents=%d nodes=%d start=%.0fs\n", c.agents, c.nodes, time.Since(begun).Seconds())
	pods, err := newPods(c, s, tokens)
	if err != nil {
		return err
	}
	m := &measured{config: c, server: s, fleet: f, pods: pods}
	if err := m.rotate(ctx); err != nil {
		return err
	}
	f.stop() // what is still to come is about the server alone
	quiet, err := pods.ask(ctx, time.After(c.quiet))
	if err != nil {
		return err
	}
	m.report(stdout)
	quiet.print(stdout, "quiet", c.pods, "")
	rate, err := floor(ctx, s, tokens, c.agents)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "floor rate=%.0f/s n=%d\n", rate, c.agents)
	fmt.Fprintf(stdout, "reissue ratio=%.2f\n", m.rate()/rate)
	return m.verdict()
}

// measured is what came of the rotation.
type measured struct {
	config config
	server *server
	fleet  *fleet
	pods   *pods

	from    time.Time
	begin   counts
	end     counts
	waits   latencies
	used    [3]time.Duration // by server, agents, new pods
	elapsed time.Duration
}

// rotate has the root rotated as one that is compromised, and waits until each SVID is replaced.
func (m *measured) rotate(ctx context.Context) error {
	command := exec.CommandContext(ctx, m.server.binary, "rotate", "start", "--root", "--reason", "compromised", "-c", m.server.config)
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("starting the rotation: %w: %s", err, out)
	}
	var err error
	if m.from, err = m.server.awaitPhase(ctx, "reissue", m.config.limit); err != nil {
		return err
	}
	before, err := m.cpu()
	if err != nil {
		return err
	}
	if m.begin, err = m.fleet.read(); err != nil {
		return err
	}
	over, asked := make(chan time.Time), make(chan error, 1)
	go func() {
		var err error
		m.waits, err = m.pods.ask(ctx, over)
		asked <- err
	}()
	err = m.fleet.await(ctx, m.config.limit, func(n counts) bool { return n.Replaced == m.config.agents })
	after, cpuErr := m.cpu()
	close(over)
	if err := errors.Join(<-asked, err, cpuErr); err != nil {
		return fmt.Errorf("waiting for each SVID to be replaced: %w", err)
	}
	for i := range m.used {
		m.used[i] = after[i] - before[i]
	}
	time.Sleep(2 * time.Second) // for one that is replaced twice
	if m.end, err = m.fleet.read(); err != nil {
		return err
	}
	m.elapsed = time.Unix(0, m.end.Last).Sub(m.from)
	return nil
}

// cpu is the processor time that server, agents and new pods have used so far.
func (m *measured) cpu() (used [3]time.Duration, err error) {
	if used[0], err = parts.CPUTime(m.server.process.PID()); err != nil {
		return used, err
	}
	for _, p := range m.fleet.processes {
		one, err := parts.CPUTime(p.PID())
		if err != nil {
			return used, err
		}
		used[1] += one
	}
	used[2], err = parts.CPUTime(os.Getpid())
	return used, err
}

func (m *measured) rate() float64 { return float64(m.config.agents) / m.elapsed.Seconds() }

func (m *measured) report(w io.Writer) {
	fmt.Fprintf(w, "reissue agents=%d seconds=%.1f rate=%.0f/s target=%d/s twice=%d failed=%d\n", m.config.agents, m.elapsed.Seconds(), m.rate(),
		targetRate, m.end.Twice, m.end.Failed-m.begin.Failed)
	m.waits.print(w, "reissue", m.config.pods, fmt.Sprintf(" target=%dms", targetWait.Milliseconds()))
	for i, who := range []string{"server", "agents", "new-pods"} {
		fmt.Fprintf(w, "cpu who=%s seconds=%.1f svid=%.0fus\n", who, m.used[i].Seconds(), float64(m.used[i].Microseconds())/float64(m.config.agents))
	}
}

// verdict is of what was done. How fast it was is printed beside its targets, and depends on the machine.
func (m *measured) verdict() error {
	var missed []error
	if m.end.Twice > 0 {
		missed = append(missed, fmt.Errorf("%d SVIDs were replaced more than once", m.end.Twice))
	}
	if m.end.Failed > m.begin.Failed {
		fmt.Fprintln(os.Stderr, "the last try that failed:", m.end.Why)
	}
	if m.waits.failed > 0 {
		missed = append(missed, fmt.Errorf("%d new pods got no certificate; the first: %w", m.waits.failed, m.waits.first))
	}
	return errors.Join(missed...)
}
