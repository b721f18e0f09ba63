package kube

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt/jwttest"
)

// watching is a cluster whose pods are watched, in a synctest bubble.
type watching struct {
	*testing.T
	s *apiServer
	c *Cluster
}

func watched(t *testing.T, f func(watching), change ...func(*apiServer, *Config)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.put(testPod())
		cfg := Config{Client: s.client(t), NodeAgents: []string{"istio-system/ztunnel"}}
		for _, f := range change {
			f(s, &cfg)
		}
		c := newCluster(t, cfg)
		run(t, c)
		synctest.Wait()
		f(watching{t, s, c})
	})
}

// auth authenticates a fresh token with the changes.
func (w watching) auth(code codes.Code, reason string, changes ...func(jwttest.Object)) csr.Caller {
	w.Helper()
	caller, err := w.c.Authenticate(w.Context(), jwttest.Sign(w, "p256", "p256", jose.ES256, jwttest.Claims(changes...)))
	jwttest.WantDenial(w, err, code, reason)
	return caller
}

func (w watching) gone(reason string) {
	w.Helper()
	w.auth(codes.Unauthenticated, reason)
}

// gets checks how many single pods were asked for.
func (w watching) gets(n int) {
	w.Helper()
	if got := w.s.count("get"); got != n {
		w.Errorf("%d pods were asked for, want %d", got, n)
	}
}

func TestD18LivePod(t *testing.T) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) {
			watched(t, func(w watching) {
				if err := w.c.Ready(); err != nil {
					w.Fatal(err)
				}
				if got := w.auth(0, ""); got.Node != "node-1" || !got.AttestedAt.Equal(time.Now()) {
					w.Errorf("node %q, attested at %v", got.Node, got.AttestedAt)
				}
				if got := w.auth(0, "", jwttest.SetKube("node", nil)); got.Node != "node-1" {
					w.Errorf("node %q; it should be the pod's if the token has none", got.Node)
				}
				w.gets(0)
			}, func(s *apiServer, _ *Config) { s.noStream = !stream })
		})
	}
}

func TestD18DeadOrOtherPod(t *testing.T) {
	past := func(d time.Duration) func(*corev1.Pod) {
		return func(p *corev1.Pod) { at := metav1.NewTime(time.Now().Add(-d)); p.DeletionTimestamp = &at }
	}
	for name, tc := range map[string]struct {
		pod    func(*corev1.Pod)
		reason string
	}{
		"pending":             {func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, ""},
		"unknown phase":       {func(p *corev1.Pod) { p.Status.Phase = corev1.PodUnknown }, csr.ReasonPodGone},
		"no phase":            {func(p *corev1.Pod) { p.Status.Phase = "" }, csr.ReasonPodGone},
		"succeeded":           {func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }, csr.ReasonPodGone},
		"failed":              {func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, csr.ReasonPodGone},
		"to be gone soon":     {past(-time.Minute), ""},
		"gone 60 s ago":       {past(60 * time.Second), ""},
		"gone 61 s ago":       {past(61 * time.Second), csr.ReasonPodGone},
		"another UID":         {func(p *corev1.Pod) { p.UID = "uid-1" }, csr.ReasonPodGone},
		"another node":        {func(p *corev1.Pod) { p.Spec.NodeName = "node-2" }, csr.ReasonPodMismatch},
		"another account":     {func(p *corev1.Pod) { p.Spec.ServiceAccountName = "root" }, csr.ReasonPodMismatch},
		"not on a node yet":   {func(p *corev1.Pod) { p.Spec.NodeName = "" }, csr.ReasonPodMismatch},
		"in another place":    {func(p *corev1.Pod) { p.Namespace = "bar" }, csr.ReasonPodGone},
		"with another name":   {func(p *corev1.Pod) { p.Name = "web-1" }, csr.ReasonPodGone},
		"all as it should be": {func(*corev1.Pod) {}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			watched(t, func(w watching) {
				w.gone(tc.reason)
				w.gone(tc.reason)
			}, func(s *apiServer, _ *Config) {
				s.remove("foo", "web-0")
				s.put(testPod(tc.pod))
			})
		})
	}
}

func TestD18LivenessIsCheckedOnEachCall(t *testing.T) {
	watched(t, func(w watching) {
		token := jwttest.Sign(w, "p256", "p256", jose.ES256, jwttest.Claims())
		_, err := w.c.Authenticate(w.Context(), token)
		jwttest.WantDenial(w, err, 0, "")
		w.s.remove("foo", "web-0")
		synctest.Wait()
		for range 3 {
			_, err = w.c.Authenticate(w.Context(), token)
			jwttest.WantDenial(w, err, codes.Unauthenticated, csr.ReasonPodGone)
		}
		if w.c.tokens.Stats().Hits != 3 {
			w.Error("the calls did not come from the cache")
		}
		w.gets(0) // the watch saw it go
		w.s.put(podAs("web-0", "uid-1", "node-1", "web"))
		synctest.Wait()
		w.gone(csr.ReasonPodGone)
		w.auth(0, "", jwttest.SetKube("pod", jwttest.Object{"name": "web-0", "uid": "uid-1"}))
		w.gets(0)
	})
}

func TestD18PodReplacedWithoutADeletion(t *testing.T) {
	watched(t, func(w watching) {
		w.s.put(podAs("web-0", "uid-1", "node-1", "web"))
		synctest.Wait()
		w.gone(csr.ReasonPodGone)
		w.gets(0)
	})
}

func TestD18PodNotSeenYet(t *testing.T) {
	pod1 := jwttest.SetKube("pod", jwttest.Object{"name": "web-1", "uid": "uid-1"})
	watched(t, func(w watching) {
		w.s.with(func() { w.s.lag = true })
		w.s.put(podAs("web-1", "uid-1", "node-1", "web"))
		if got := w.auth(0, "", pod1, jwttest.SetKube("node", nil)); got.Node != "node-1" {
			w.Errorf("node %q", got.Node)
		}
		w.gets(1)
		w.auth(codes.Unauthenticated, csr.ReasonPodMismatch, pod1, jwttest.SetKube("node", jwttest.Object{"name": "node-2"}))
		w.s.with(func() { w.s.hang = true })
		start := time.Now()
		w.auth(codes.Unavailable, csr.ReasonPodUnknown, pod1)
		if took := time.Since(start); took > podTimeout {
			w.Errorf("it took %v", took)
		}
		w.s.with(func() { w.s.hang, w.s.down = false, true })
		w.auth(codes.Unavailable, csr.ReasonPodUnknown, pod1)
		w.auth(0, "") // the one that was seen needs nobody
	})
}

func TestD18SeenBeforeItHadANode(t *testing.T) {
	watched(t, func(w watching) {
		w.s.put(podAs("web-1", "uid-1", "", "web"))
		synctest.Wait()
		w.s.with(func() { w.s.lag = true })
		w.s.put(podAs("web-1", "uid-1", "node-1", "web"))
		w.auth(0, "", jwttest.SetKube("pod", jwttest.Object{"name": "web-1", "uid": "uid-1"}))
		w.gets(1)
	})
}

func TestD18OneGetForManyCallers(t *testing.T) {
	watched(t, func(w watching) {
		w.s.with(func() { w.s.hang = true })
		done := make(chan error, 200)
		call := func(pod int) {
			p := jwttest.SetKube("pod", jwttest.Object{"name": fmt.Sprint("web-", pod), "uid": fmt.Sprint("uid-", pod)})
			_, err := w.c.Authenticate(w.Context(), jwttest.Sign(w, "p256", "p256", jose.ES256, jwttest.Claims(p)))
			done <- err
		}
		for i := range 100 {
			go call(1 + i%50)
		}
		synctest.Wait()
		w.gets(maxGets) // of 50 pods, and no more at once
		for range 100 {
			jwttest.WantDenial(w, <-done, codes.Unavailable, csr.ReasonPodUnknown)
		}
	})
}

func TestD18BrokenWatch(t *testing.T) {
	watched(t, func(w watching) {
		w.s.cut()
		time.Sleep(maxBroken - time.Second)
		w.auth(0, "") // not broken for long
		w.gets(0)
		time.Sleep(2 * time.Second)
		w.auth(codes.Unavailable, csr.ReasonPodUnknown)
		if w.c.Ready() == nil {
			w.Error("ready with a broken watch")
		}
		w.s.remove("foo", "web-0") // nobody tells us
		w.s.with(func() { w.s.down = false })
		w.auth(codes.Unauthenticated, csr.ReasonPodGone) // one GET knows
		w.s.put(podAs("web-0", "uid-1", "node-1", "web"))
		time.Sleep(20 * time.Second) // the reflector's backoff
		if err := w.c.Ready(); err != nil {
			w.Fatal(err)
		}
		before := w.s.count("get")
		w.gone(csr.ReasonPodGone)
		w.auth(0, "", jwttest.SetKube("pod", jwttest.Object{"name": "web-0", "uid": "uid-1"}))
		w.gets(before)
	})
}

func TestD18SilentWatch(t *testing.T) {
	watched(t, func(w watching) {
		for range 10 {
			time.Sleep(time.Minute)
			w.s.bookmark()
			synctest.Wait()
			if err := w.c.Ready(); err != nil {
				w.Fatal(err)
			}
		}
		time.Sleep(maxSilent)
		if w.c.Ready() == nil {
			w.Error("ready with a silent watch")
		}
		w.auth(0, "")
		w.gets(1)
	})
}

func TestD18BeforeTheFirstList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.put(testPod())
		w := watching{t, s, newCluster(t, Config{Client: s.client(t)})}
		w.auth(0, "") // Run does not run; keys and pod are fetched
		w.gets(1)
		if w.c.Ready() == nil {
			w.Error("ready without a watch")
		}
	})
}

func TestTokenWithoutPod(t *testing.T) {
	watched(t, func(w watching) {
		w.auth(codes.Unauthenticated, csr.ReasonTokenNoPod, jwttest.SetKube("pod", nil))
	})
	watched(t, func(w watching) {
		w.auth(0, "", jwttest.SetKube("pod", nil))
	}, func(_ *apiServer, cfg *Config) { cfg.AllowUnboundTokens = true })
}

// agent is a node agent as Authenticate and its caller leave it.
func agent(changes ...func(*csr.Caller)) csr.Caller {
	c := csr.Caller{
		Method: csr.MethodToken, Cluster: "Kubernetes", Namespace: "istio-system", ServiceAccount: "ztunnel",
		PodName: "ztunnel-1", PodUID: "uid-z", Node: "node-1",
	}
	for _, f := range changes {
		f(&c)
	}
	return c
}

func TestD16D18OnNode(t *testing.T) {
	at := func(d time.Duration) *metav1.Time { t := metav1.NewTime(time.Now().Add(d)); return &t }
	ztunnel := func() *corev1.Pod {
		p := podAs("ztunnel-1", "uid-z", "node-1", "ztunnel")
		p.Namespace = "istio-system"
		return p
	}
	for name, tc := range map[string]struct {
		caller  func(*csr.Caller)
		change  func(*apiServer)
		account string
		code    codes.Code
		reason  string
	}{
		"on the node":      {},
		"other account":    {account: "db", code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"account no name":  {account: "../db", code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"not listed":       {caller: func(c *csr.Caller) { c.Namespace = "foo" }, code: codes.PermissionDenied, reason: csr.ReasonNotNodeAgent},
		"certificate":      {caller: func(c *csr.Caller) { c.Method = csr.MethodMTLS }, code: codes.PermissionDenied, reason: csr.ReasonTokenNoPod},
		"no pod in token":  {caller: func(c *csr.Caller) { c.PodUID = "" }, code: codes.PermissionDenied, reason: csr.ReasonTokenNoPod},
		"another cluster":  {caller: func(c *csr.Caller) { c.Cluster = "other" }, code: codes.PermissionDenied, reason: csr.ReasonCluster},
		"no node":          {caller: func(c *csr.Caller) { c.Node = "" }, code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"agent elsewhere":  {caller: func(c *csr.Caller) { c.Node = "node-2" }, code: codes.Unauthenticated, reason: csr.ReasonPodMismatch},
		"agent's UID":      {caller: func(c *csr.Caller) { c.PodUID = "uid-y" }, code: codes.Unauthenticated, reason: csr.ReasonPodGone},
		"agent gone":       {change: func(s *apiServer) { s.remove("istio-system", "ztunnel-1") }, code: codes.Unauthenticated, reason: csr.ReasonPodGone},
		"pod off the node": {change: func(s *apiServer) { s.put(podAs("web-0", "uid-0", "node-2", "web")) }, code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"on and off":       {change: func(s *apiServer) { s.put(podAs("web-9", "uid-9", "node-2", "web")) }},
		"in other namespace": {change: func(s *apiServer) {
			s.remove("foo", "web-0")
			s.put(testPod(func(p *corev1.Pod) { p.Namespace = "bar" }))
		}, code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"ended":            {change: func(s *apiServer) { s.put(testPod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })) }, code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"deleted long ago": {change: func(s *apiServer) { s.put(testPod(func(p *corev1.Pod) { p.DeletionTimestamp = at(-2 * time.Minute) })) }, code: codes.PermissionDenied, reason: csr.ReasonNotOnNode},
		"being deleted":    {change: func(s *apiServer) { s.put(testPod(func(p *corev1.Pod) { p.DeletionTimestamp = at(time.Minute) })) }},
		"not seen yet":     {account: "new", change: func(s *apiServer) { s.lag = true; s.put(podAs("new-0", "uid-n", "node-1", "new")) }},
		"not seen, hung":   {account: "new", change: func(s *apiServer) { s.hang = true }, code: codes.Unavailable, reason: csr.ReasonPodUnknown},
		"seen, API down":   {change: func(s *apiServer) { s.cut() }},
	} {
		t.Run(name, func(t *testing.T) {
			watched(t, func(w watching) {
				if tc.change != nil {
					tc.change(w.s)
					synctest.Wait()
				}
				caller := agent()
				if tc.caller != nil {
					tc.caller(&caller)
				}
				account := tc.account
				if account == "" {
					account = "web"
				}
				jwttest.WantDenial(w, w.c.OnNode(w.Context(), caller, "foo", account), tc.code, tc.reason)
			}, func(s *apiServer, _ *Config) { s.put(ztunnel()) })
		})
	}
}

func TestD18NoPodWatchNoImpersonation(t *testing.T) {
	c := newCluster(t, Config{JWKSFile: jwttest.File(t, jwttest.KeySet(t, "p256")), NodeAgents: []string{"istio-system/ztunnel"}})
	err := c.OnNode(t.Context(), agent(), "foo", "web")
	jwttest.WantDenial(t, err, codes.PermissionDenied, csr.ReasonNoPodWatch)
	if !strings.Contains(err.Error(), "istio-system/ztunnel asks for foo/web, not for itself") {
		t.Errorf("it does not say what was asked: %v", err)
	}
	if err := c.Alive(t.Context(), "foo", "web", "node-1", nil); err != nil {
		t.Errorf("Alive without a pod watch: %v", err)
	}
}

func TestD16Alive(t *testing.T) {
	watched(t, func(w watching) {
		hash := csr.PodHash("Kubernetes", "uid-0")
		check := func(ns, account, node string, hash []byte, code codes.Code, reason string) {
			w.Helper()
			jwttest.WantDenial(w, w.c.Alive(w.Context(), ns, account, node, hash), code, reason)
		}
		check("foo", "web", "node-1", hash, 0, "")
		check("foo", "web", "", hash, 0, "")
		check("foo", "web", "node-2", hash, codes.Unauthenticated, csr.ReasonPodMismatch)
		check("foo", "db", "node-1", hash, codes.Unauthenticated, csr.ReasonPodMismatch)
		check("bar", "web", "node-1", hash, codes.Unauthenticated, csr.ReasonPodMismatch)
		check("foo", "web", "node-1", hash[:8], codes.Unauthenticated, csr.ReasonPodGone)
		check("foo", "web", "node-1", append(hash, 0), codes.Unauthenticated, csr.ReasonPodGone)
		if n := w.s.count("list"); n != 0 {
			w.Errorf("%d lists", n)
		}
		check("foo", "web", "node-1", csr.PodHash("Other", "uid-0"), codes.Unauthenticated, csr.ReasonPodGone)
		check("foo", "web", "node-1", csr.PodHash("Kubernetes", "uid-5"), codes.Unauthenticated, csr.ReasonPodGone)
		if n := w.s.count("list"); n != 2 {
			w.Errorf("%d lists, want one for each unknown pod", n)
		}
		w.s.cut()
		time.Sleep(maxBroken)
		check("foo", "web", "node-1", hash, codes.Unavailable, csr.ReasonPodUnknown)
		w.s.with(func() { w.s.down = false })
		check("foo", "web", "node-1", hash, 0, "")
		time.Sleep(20 * time.Second)
		w.s.remove("foo", "web-0")
		synctest.Wait()
		n := w.s.count("list")
		check("foo", "web", "node-1", hash, codes.Unauthenticated, csr.ReasonPodGone)
		if w.s.count("list") != n {
			w.Error("a pod that the watch saw go was asked for")
		}
	})
}

func TestDeletedPodsAreForgottenInTime(t *testing.T) {
	w := newPodWatch("Kubernetes", nil, nil)
	for i := range maxGone + 100 {
		p := podAs("p", strconv.Itoa(i), "node-1", "web")
		if w.Add(p) != nil || w.Delete(p) != nil {
			t.Fatal("store refused a pod")
		}
	}
	if len(w.gone) != maxGone || len(w.ring) != maxGone || len(w.byName)+len(w.byHash)+len(w.byPlace) != 0 {
		t.Errorf("%d gone, %d in the ring, %d %d %d pods", len(w.gone), len(w.ring), len(w.byName), len(w.byHash), len(w.byPlace))
	}
	for i := range maxGone + 100 {
		if _, gone := w.named(podName{"foo", "p"}, strconv.Itoa(i), time.Now()); gone != (i >= 100) {
			t.Fatalf("pod %d: gone is %v", i, gone)
		}
	}
}

func TestPodWatchIndexesStayInStep(t *testing.T) {
	w := newPodWatch("Kubernetes", nil, nil)
	w.Add(podAs("a", "1", "", "web"))
	w.Update(podAs("a", "1", "node-1", "web"))
	w.Add(podAs("b", "2", "node-1", "web"))
	w.Update(podAs("b", "3", "node-2", "web"))
	w.Delete(podAs("b", "2", "node-1", "web")) // late: it is another pod now
	want := map[place]int{{"node-1", "foo", "web"}: 1, {"node-2", "foo", "web"}: 1}
	if len(w.byPlace) != len(want) || len(w.byName) != 2 || len(w.byHash) != 2 {
		t.Errorf("places %v, %d names, %d hashes", w.byPlace, len(w.byName), len(w.byHash))
	}
	for at, n := range want {
		if len(w.byPlace[at]) != n {
			t.Errorf("%v: %d pods, want %d", at, len(w.byPlace[at]), n)
		}
	}
	w.Replace([]any{podAs("c", "4", "node-1", "web")}, "9")
	if _, gone := w.named(podName{"foo", "a"}, "1", time.Now()); !gone {
		t.Error("a pod that a new list lacks should be gone")
	}
	if len(w.byName) != 1 || len(w.byHash) != 1 || len(w.byPlace) != 1 {
		t.Error("pods of the old list are left")
	}
}
